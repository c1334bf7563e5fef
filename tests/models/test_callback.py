"""Audits within a Hugging Face Trainer, and the examples of methods there."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from fairlearn.metrics import demographic_parity_difference
from transformers import Trainer, TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification

import fairhead
from fairhead.errors import InputError

EXAMPLES = Path(__file__).parents[2] / "examples"


class Tracker(TrainerCallback):
    """What any tracker gets."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **more):
        self.logs.append(dict(logs))


def rows(n, seed=0, classes=2):
    """Pictures whose group makes them brighter."""
    rng = np.random.default_rng(seed)
    group, label = rng.integers(0, 2, n), rng.integers(0, classes, n)
    pixels = torch.tensor(rng.normal(label + group, 1, (4, 4, 1, n)).T, dtype=torch.float32)
    return [{"pixel_values": p, "labels": int(y), "sex": "fm"[g]} for p, y, g in zip(pixels, label, group, strict=True)]


def made_trainer(folder, evaluation, classes=("no", "yes"), kind=Trainer, **options):
    torch.manual_seed(0)
    shape = {"image_size": 4, "patch_size": 2, "num_channels": 1, "hidden_size": 8, "intermediate_size": 8}
    names = dict(enumerate(classes))
    model = ViTForImageClassification(
        ViTConfig(num_hidden_layers=1, num_attention_heads=2, id2label=names, initializer_range=0.5, **shape)
    )
    arguments = TrainingArguments(
        folder, max_steps=2, eval_steps=1, eval_strategy="steps", report_to="none", use_cpu=True, disable_tqdm=True,
        per_device_train_batch_size=16, per_device_eval_batch_size=64, save_strategy="no", **options,
    )  # fmt: skip
    tracker = Tracker()
    return kind(model, arguments, train_dataset=rows(32), eval_dataset=evaluation, callbacks=[tracker]), tracker


@pytest.mark.parametrize("kind", ["list", "datasets"])
def test_each_evaluation_is_audited_and_every_tracker_gets_the_gaps(kind, tmp_path):
    evaluation = rows(301)  # the last batch is not full
    if kind == "datasets":
        table = pytest.importorskip("datasets").Dataset.from_list(
            [{**row, "pixel_values": row["pixel_values"].numpy()} for row in evaluation]
        )
        evaluation = table.with_format("torch")  # from which the Trainer leaves out what the model does not take
    trainer, tracker = made_trainer(tmp_path, evaluation)
    callback = fairhead.AuditCallback(trainer, groups=["sex"])
    trainer.add_callback(callback)
    trainer.train()
    assert [(prefix, step) for prefix, step, _ in callback.audits] == [("eval", 1), ("eval", 2)]
    logged = [logs for logs in tracker.logs if "eval_DP_sex" in logs]
    assert len(logged) == 2
    found = trainer.predict(evaluation)  # which is not audited: nobody named groups for it
    assert not any("sex" in name for name in found.metrics)
    assert len(callback.audits) == 2
    sex, said = [row["sex"] for row in evaluation], found.predictions.argmax(-1)
    expected = demographic_parity_difference(found.label_ids, said, sensitive_features=sex)
    assert logged[-1]["eval_DP_sex"] == pytest.approx(expected)
    assert 0 <= logged[-1]["eval_DP_sex_low"] <= expected <= logged[-1]["eval_DP_sex_high"] <= 1
    again = fairhead.audit({"y": found.label_ids, "p": said, "sex": sex}, label="y", prediction="p", groups="sex")
    for name in ("DP", "EOp", "EOd"):  # the second class is the positive one, whatever the classes are called
        assert logged[-1][f"eval_{name}_sex_low"] == pytest.approx(again[name, "sex"].low)


def test_each_of_several_evaluation_sets_has_its_own_groups(tmp_path, caplog):
    data = {"one": rows(120, 1), "two": rows(80, 2)}
    trainer, _ = made_trainer(tmp_path, data, classes=("a", "b", "c"))
    trainer.add_callback(fairhead.AuditCallback(trainer, groups="sex", metrics=["accuracy", "DP"], n_boot=200))
    found = trainer.evaluate()
    assert {"eval_one_accuracy", "eval_one_DP_sex", "eval_two_DP_sex_high"} <= found.keys()
    assert "eval_DP_sex" in trainer.evaluate(rows(90, 3))  # and so have data that come later
    few = rows(40, 4)[:12]
    found = [trainer.evaluate(few) for _ in range(2)]
    assert all(np.isnan(found[1][name]) for name in ("eval_DP_sex", "eval_DP_sex_low", "eval_DP_sex_high"))
    assert caplog.text.count("eval_DP_sex is undefined and logged as NaN") == 1


def test_an_undefined_gap_does_not_end_training_and_is_never_the_best(tmp_path):
    trainer, _ = made_trainer(tmp_path, rows(12), metric_for_best_model="eval_EOd_sex", greater_is_better=False)
    fairhead.AuditCallback(trainer, groups="sex", n_boot=200)
    trainer.train()
    assert trainer.state.global_step == 2
    trainer._determine_best_metric({"eval_EOd_sex": 0.5}, None)
    assert trainer.state.best_metric == 0.5


def test_groups_may_be_given_as_values(tmp_path):
    evaluation = rows(100)
    sex = [row.pop("sex") for row in evaluation]
    trainer, _ = made_trainer(tmp_path, evaluation)
    fairhead.AuditCallback(trainer, {"sex": sex}, n_boot=200)
    assert "eval_EOd_sex" in trainer.evaluate()
    with pytest.raises(InputError, match=r"belong to trainer\.eval_dataset"):
        trainer.evaluate(rows(100))
    trainer, _ = made_trainer(tmp_path, evaluation)
    with pytest.raises(InputError, match="99 values and the evaluation data 100 rows"):  # before anything is trained
        fairhead.AuditCallback(trainer, {"sex": sex[1:]})


@pytest.mark.parametrize("none", [None, float("nan")])
@pytest.mark.parametrize("as_values", [False, True])
def test_rows_without_a_group_are_left_out_of_its_figures_and_counted(as_values, none, tmp_path, caplog):
    evaluation = rows(301)
    known = [row for i, row in enumerate(evaluation) if i % 5]
    some = [row if i % 5 else {**row, "sex": none} for i, row in enumerate(evaluation)]
    trainer, _ = made_trainer(tmp_path, some)
    groups = {"sex": [row["sex"] for row in some]} if as_values else "sex"
    callback = fairhead.AuditCallback(trainer, groups, n_boot=200)
    found, _ = trainer.evaluate(), trainer.evaluate()
    assert callback.audits[0][2].provenance["audit"]["without_group"] == {"sex": 61}
    assert caplog.text.count("61 rows of the evaluation have no sex") == 1
    trainer, _ = made_trainer(tmp_path, known)
    fairhead.AuditCallback(trainer, "sex", n_boot=200)
    alone = trainer.evaluate()
    assert {k: found[k] for k in found if "sex" in k} == pytest.approx({k: alone[k] for k in alone if "sex" in k})


@pytest.mark.parametrize("option", ["train_sampling_strategy", "dataloader_drop_last"])
def test_rows_keep_their_groups_however_the_trainer_makes_batches(option, tmp_path):
    class ByLength(Trainer):
        """As transformers does with texts, whose lengths differ."""

        def _get_eval_sampler(self, eval_dataset):
            if self.args.train_sampling_strategy == "group_by_length":
                return torch.utils.data.RandomSampler(eval_dataset)
            return super()._get_eval_sampler(eval_dataset)

    def gap(data, **options):
        trainer, _ = made_trainer(tmp_path, data, kind=ByLength, **options)
        with torch.no_grad():  # the model says "yes" of half of the rows
            pixels = torch.stack([row["pixel_values"] for row in data[:256]])
            trainer.model.classifier.bias -= trainer.model(pixels).logits.median(0).values
        fairhead.AuditCallback(trainer, groups="sex", n_boot=200)
        found = trainer.evaluate()["eval_EOd_sex"]
        assert trainer.args.train_sampling_strategy == options.get("train_sampling_strategy", "random")
        return found

    evaluation = rows(301)
    if option == "dataloader_drop_last":
        expected, found = gap(evaluation[:256]), gap(evaluation, dataloader_drop_last=True)
    else:
        expected, found = gap(evaluation), gap(evaluation, train_sampling_strategy="group_by_length")
    assert found == pytest.approx(expected)
    assert expected > 0.2


def test_what_cannot_be_audited_is_told(tmp_path):
    trainer, _ = made_trainer(tmp_path, rows(20), batch_eval_metrics=True)
    with pytest.raises(InputError, match="batch_eval_metrics"):
        fairhead.AuditCallback(trainer, groups=["sex"])
    with pytest.raises(InputError, match="num_labels=1"):
        fairhead.AuditCallback(made_trainer(tmp_path, rows(20), classes=("score",))[0], groups=["sex"])
    trainer, _ = made_trainer(tmp_path, rows(20))
    trainer.model.config.problem_type = "multi_label_classification"
    with pytest.raises(InputError, match="multi_label_classification"):
        fairhead.AuditCallback(trainer, groups=["sex"])
    with pytest.raises(InputError, match=r"no column .sec.; there are: pixel_values, labels, sex"):
        fairhead.AuditCallback(made_trainer(tmp_path, rows(20))[0], groups=["sec"])

    class Shuffled(Trainer):
        def _get_eval_sampler(self, eval_dataset):
            return torch.utils.data.RandomSampler(eval_dataset)

    trainer, _ = made_trainer(tmp_path, rows(20), kind=Shuffled)
    fairhead.AuditCallback(trainer, groups=["sex"])
    with pytest.raises(InputError, match="in the order of their data"):
        trainer.evaluate()


@pytest.mark.parametrize("example", ["audit", "dam", "balance", "match"])
def test_the_examples_run(example, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr("sys.argv", ["example", str(tmp_path)])
    found = runpy.run_path(str(EXAMPLES / f"{example}_in_trainer.py"))
    logged = [logs for logs in found["trainer"].state.log_history if "eval_EOd_shade" in logs]
    assert len(logged) == 8
    assert "eval_EOd_shade_low" in capsys.readouterr().out
    if example == "audit":  # plain training learns the shade alone
        assert logged[-1]["eval_EOd_shade"] > 0.8
    if example in ("balance", "match"):  # and these the digits: a constant answer has no gap either
        assert logged[-1]["eval_EOd_shade"] < 0.3
        assert logged[-1]["eval_accuracy"] > 0.75
    if example == "match":  # rows that are rare in training and not in use
        rare = torch.tensor([(row["shade"] == "light") != row["labels"] for row in found["train"]])
        assert found["matched"].weights[rare].mean() > 3 * found["matched"].weights[~rare].mean()
