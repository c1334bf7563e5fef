"""`fairhead mitigate`: one run, kept whole."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from made_faces import make_faces
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification
from typer.testing import CliRunner

from fairhead import load
from fairhead.bench import one_run
from fairhead.bench.cell import run_cell
from fairhead.bench.grid import Backbone, Cell, Data, Method
from fairhead.bench.one_run import save_model
from fairhead.cli import app
from fairhead.cli.mitigate import EPILOG
from fairhead.errors import InputError
from fairhead.mitigate import names
from fairhead.models import save
from fairhead.models.fresh import Recipe
from fairhead.models.inputs import normalising
from fairhead.records import Records
from fairhead.report.sections.changes import Compared
from fairhead.train.fitting import predict

TINY = {"width": 16, "mlp": 16, "image_size": 8, "patch_size": 4}
MODEL = ["--model", "vit-2x2", *(part for k, v in TINY.items() for part in ("--model-option", f"{k}={v}"))]


@pytest.fixture(scope="module")
def faces(tmp_path_factory):
    return make_faces(tmp_path_factory.mktemp("faces"))


def a_cell(faces, method="erm", train="all", uses_groups=False, **options):
    return Cell(
        Data("faces", f"utkface:{faces}", group="white", split_by_seed=True),
        Backbone("tiny", "vit-2x2", train, TINY),
        Method(method, method, options, uses_groups=uses_groups),
        0,
        {"epochs": 1, "batch_size": 32, "learning_rate": 1e-3},
    )


def mitigate(*arguments):
    from fairhead.errors import FairheadError

    result = CliRunner().invoke(app, ["mitigate", *map(str, arguments)], obj=["mitigate"], standalone_mode=False)
    if isinstance(result.exception, FairheadError):
        raise result.exception
    assert result.exception is None, result.output
    return result


def test_a_run_does_not_replace_another(faces, tmp_path):
    one_run.mitigate(a_cell(faces), tmp_path / "run")
    kept = (tmp_path / "run/run.json").read_bytes()
    with pytest.raises(InputError, match=r"run holds another run \(erm, seed 0\): choose another folder"):
        one_run.mitigate(a_cell(faces, "scaling"), tmp_path / "run")
    assert (tmp_path / "run/run.json").read_bytes() == kept
    one_run.mitigate(a_cell(faces), tmp_path / "run")  # the same one again


def test_a_run_leaves_model_records_audit_and_report(faces, tmp_path):
    out = tmp_path / "out"
    said = mitigate(
        "dam", "--data", f"utkface:{faces}", *MODEL, "--epochs", 2, "--batch-size", 32, "--lr", 1e-2, "--out", out,
        "--against", "erm", "--cache", tmp_path / "cache", "--device", "cpu",
    ).stdout  # fmt: skip
    assert {path.name for path in out.iterdir()} == {
        ".lock", "audit.json", "model", "records-erm.csv", "records.csv", "report.html", "report.json", "run.json",
    }  # fmt: skip
    assert "one training run" in said
    assert "A = erm, B = dam" in said
    assert json.loads((out / "audit.json").read_text())["comparison"]["schema"] == "fairhead.comparison/1"
    records = Records.read(out / "records.csv")
    assert set(records.groups) == {"white", "race"}

    # The saved model gives the records' scores back, from the picture files, through Hugging Face's own processor.
    model, processor = load(out / "model"), AutoImageProcessor.from_pretrained(out / "model")
    from fairhead.data import read

    test = read("utkface", faces, seed=0).examples("test")
    pictures = [Image.fromarray(np.asarray(image)) for image in test.inputs]
    with torch.inference_mode():
        scores = model(**processor(pictures, return_tensors="pt")).logits.softmax(-1)[:, 1]
    by_id = dict(zip(test.ids.tolist(), scores.tolist(), strict=True))
    np.testing.assert_allclose(records.scores, [by_id[str(name)] for name in records.id], atol=1e-5)

    card = ModelCard.load(out / "model" / "README.md")
    audited = json.loads((out / "audit.json").read_text())
    figures = {(e["metric"], e["group_by"]): e for e in audited["estimates"] if e["value"] is not None}
    assert len(card.data.eval_results) == len(figures)
    shown = next(result for result in card.data.eval_results if result.metric_name == "accuracy overall")
    wanted = figures["accuracy", None]
    assert (shown.metric_value, shown.metric_args["low"]) == (wanted["value"], wanted["low"])
    assert shown.dataset_name == f"utkface:{faces.name}"
    for words in (
        "Training saw no group",
        "after plain training | this model",
        "It carries DAM",
        "one training run",
        "compared with the same model after plain training",
        "EOd by white: mean of the gaps of TPR and FPR",
    ):
        assert words in card.text
    assert str(tmp_path) not in card.content  # where files lay is nobody's business


def test_from_pretrained_gives_the_outputs_that_were_measured(faces, tmp_path):
    """Of a model whose training rows were weighted: nothing of the method is left in it."""
    run = one_run.mitigate(a_cell(faces, "balance", clusters=2), tmp_path / "out", cache=tmp_path / "cache")
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out" / "model").eval()
    torch.manual_seed(0)
    pictures = torch.randn(3, 3, 8, 8)
    assert torch.equal(model(pictures).logits, run.model(pictures).logits)
    card = ModelCard.load(tmp_path / "out" / "model" / "README.md")
    assert "`from_pretrained` reproduces the measured outputs" in card.text
    model.save_pretrained(tmp_path / "out" / "model")
    save(model, tmp_path / "out" / "model")
    assert "measured nothing of it" in (tmp_path / "out" / "model" / "README.md").read_text()  # the other was not of it
    (tmp_path / "out" / "model" / "README.md").write_text("Somebody's own.")
    save(model, tmp_path / "out" / "model")
    assert (tmp_path / "out" / "model" / "README.md").read_text() == "Somebody's own."


@pytest.mark.parametrize("name", names("classifier", uses_groups=False))
def test_every_method_runs_on_a_grid_s_cell_and_its_model_can_be_kept(name, faces, tmp_path):
    cell = a_cell(faces, name)
    done = run_cell(cell, "cpu", tmp_path / "cache")
    save_model(done.trained.model, done.task.kind, done.task.classes, cell, tmp_path / "model")
    recipe = Recipe("vit-2x2", done.task.classes, TINY)
    again = normalising(load(tmp_path / "model"), recipe.pictures())
    torch.testing.assert_close(predict(again, done.task.test), predict(done.trained.model, done.task.test))


@pytest.mark.parametrize("name", names(uses_groups=True))
def test_every_reference_runs_on_a_grid_s_cell(name, tmp_path):
    # DFR fits on half of the validation rows, which must have every (class, group) cell.
    faces = make_faces(tmp_path / "faces", n=480)
    done = run_cell(a_cell(faces, name, uses_groups=True), "cpu", tmp_path / "cache")
    assert done.row["uses_groups"]
    assert len(done.records) == 48


@pytest.mark.parametrize("name", ["erm", "dam"])
def test_a_model_of_last_encoder_training_is_kept_whole(name, faces, tmp_path):
    cell = a_cell(faces, name, train="last_encoder")
    done = run_cell(cell, "cpu", tmp_path / "cache")
    save_model(done.trained.model, done.task.kind, done.task.classes, cell, tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.config.num_hidden_layers == 2
    normalising(again, Recipe("vit-2x2", done.task.classes, TINY).pictures())
    whole = predict(again, done.task.test)
    np.testing.assert_allclose(done.records.scores, whole[:, 1].numpy(), atol=1e-5)


def test_the_help_names_every_method():
    for name in names("classifier"):
        assert f"`{name}`" in EPILOG


def test_a_group_given_to_training_is_refused(faces, tmp_path):
    given = ["--data", f"utkface:{faces}", *MODEL, "--out", tmp_path / "out"]
    with pytest.raises(ValueError, match="dam never sees a group"):
        mitigate("dam", *given, "--reference-group", "white")
    with pytest.raises(ValueError, match="training never sees them"):
        mitigate("dam", *given, "--option", "group=white")
    with pytest.raises(ValueError, match="group_dro trains with the sensitive attribute"):
        mitigate("group_dro", *given)
    with pytest.raises(ValueError, match="race is what the model is to predict"):
        mitigate("erm", *given, "--data-option", "target=race", "--data-option", "groups=[race]", "--device", "cpu")
    with pytest.raises(ValueError, match="Did you mean 'dam'"):
        mitigate("damm", *given)
    with pytest.raises(ValueError, match="takes key=value"):
        mitigate("dam", *given, "--option", "values")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--epochs", 0], "--epochs is 0; expected a whole number of at least 1"),
        (["--lr", "nan"], "--lr is nan; expected a number above 0"),
        (["--lr", "inf"], "--lr is inf; expected a number above 0"),
        (["--seed", "-1"], "--seed is -1; expected a whole number from 0 to 4,294,967,295"),
        (["--weight-decay", "-2"], "--weight-decay is -2.0; expected a number of at least 0"),
        (["--data", "faces"], "named as name:path, such as utkface:UTKFace.zip; found 'faces'"),
        (["--limit", 0], "--limit is 0; expected a whole number of at least 1"),
        (["--option", "values=0"], "values is 0; expected a whole number of at least 1"),
        (["--model", "vit-2x3"], "width is 16; expected a multiple of 3"),
        (["--against", "erm2"], "no method 'erm2'"),
        (["--against", "group_dro"], "group_dro trains with the sensitive attribute"),
        (["--selection", "worst_group"], "looks at the groups of validation rows: say which column"),
        (["--against", "dam"], "--against dam is the method itself"),
    ],
)
def test_mistakes_are_found_before_anything_is_read_or_trained(given, message, tmp_path):
    # There are no data at all where it is told to look.
    with pytest.raises(ValueError, match=message):
        mitigate("dam", "--data", f"utkface:{tmp_path / 'nowhere'}", *MODEL, "--device", "cpu", *given)


def test_an_epoch_can_be_chosen_with_groups_and_is_flagged(faces, tmp_path):
    plan = {"epochs": 4, "batch_size": 32, "learning_rate": 3e-3}
    plain = run_cell(replace(a_cell(faces), plan=plan), "cpu", tmp_path)
    flagged = Method("erm by groups", "erm", uses_groups=True, selection="worst_group")
    done = run_cell(replace(a_cell(faces), plan=plan, method=flagged), "cpu", tmp_path)
    # The same training; another rule for the epoch.
    assert [epoch[:2] for epoch in done.row["history"]] == [epoch[:2] for epoch in plain.row["history"]]
    assert done.row["settings"]["selection"] == "worst_group"
    assert plain.row["settings"]["selection"] == "accuracy"
    validation = done.task.validation
    right = predict(done.trained.model, validation).argmax(-1) == validation.labels
    cells = 2 * validation.labels + done.task.groups("validation")
    worst = min(right[cells == cell].double().mean().item() for cell in cells.unique())
    assert done.trained.fit.best.score == worst == max(score for *_, score in done.row["history"])
    assert flagged.remark == "epoch chosen with groups"
    out = tmp_path / "out"
    mitigate(
        "erm", "--data", f"utkface:{faces}", *MODEL, "--epochs", 1, "--batch-size", 32, "--selection", "worst_group",
        "--reference-group", "white", "--against", "erm", "--out", out, "--cache", tmp_path, "--device", "cpu",
    )  # fmt: skip
    assert "was selected with the groups of the validation rows" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("train", ["all", "last_encoder"])
@pytest.mark.parametrize("method", ["dam", "lff"])  # lff: of two networks the one that predicts
def test_the_last_good_epoch_of_a_run_that_diverged_is_kept(method, train, faces, tmp_path, monkeypatch):
    # A learning rate that grows out of hand after the first epoch: NaN at some later step.
    from fairhead.train import TrainingPlan
    from fairhead.train.loop import TrainingDiverged

    rate = TrainingPlan.rate
    monkeypatch.setattr(TrainingPlan, "rate", lambda self, step, steps: rate(self, step, steps) if step < 4 else 1e38)
    out = tmp_path / "out"
    with pytest.raises(TrainingDiverged, match=r"at step \d \(epoch 2 of 3\).* back at epoch 1.* kept in .*model"):
        mitigate(
            method, "--data", f"utkface:{faces}", *MODEL, "--epochs", 3, "--batch-size", 32, "--lr", 1e-2, "--out", out,
            "--cache", tmp_path / "cache", "--device", "cpu", "--train", train,
        )  # fmt: skip
    model = load(out / "model")
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    assert len(model.vit.layers) == 2
    assert (out / "model" / "preprocessor_config.json").exists()
    assert not (out / "records.csv").exists()


def test_a_run_that_was_killed_goes_on_from_its_checkpoint(faces, tmp_path, monkeypatch):
    from fairhead.train import TrainingPlan

    class Killed(BaseException):
        """As a signal would come."""

    arguments = [
        "jtt", "--data", f"utkface:{faces}", *MODEL, "--epochs", 3, "--batch-size", 32, "--lr", 1e-2,
        "--cache", tmp_path / "cache", "--device", "cpu", "--against", "erm",
    ]  # fmt: skip
    mitigate(*arguments, "--out", tmp_path / "whole")
    arguments += ["--checkpoint-minutes", 0]
    rate, taken = TrainingPlan.rate, []

    def killed(plan, step, steps):
        taken.append(step)
        if len(taken) == 10:  # in the second stage
            raise Killed
        return rate(plan, step, steps)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(TrainingPlan, "rate", killed)
        with pytest.raises(Killed):
            mitigate(*arguments, "--out", out)
    assert sorted(path.name for path in (out / "checkpoint" / "method").iterdir()) == ["stage-1", "stage-3"]
    with pytest.raises(InputError, match=r"of another run \(learning_rate was 0.01, now 0.001\)"):
        mitigate(*arguments, "--out", out, "--lr", 1e-3)
    mitigate(*arguments, "--out", out)
    assert not (out / "checkpoint").exists()
    assert json.loads((out / "run.json").read_text())["resumed_at"] > 0
    for file in ("records.csv", "records-erm.csv", "model/model.safetensors"):
        assert (out / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file


@pytest.mark.parametrize("command", ["bench", "mitigate"])
def test_help_imports_no_torch(command):
    look = (
        f"import sys\nfrom fairhead.cli import main\ntry:\n    main(['{command}', '--help'])\n"
        "except SystemExit:\n    pass\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "100"}
    )
    assert done.returncode == 0, done.stderr
    assert "--out" in done.stdout


def test_where_plain_training_is_kept_both_models_are_said_to_be_the_same(faces, tmp_path):
    """These faces have no groups within their classes: nothing is balanced, and nothing is compared with itself."""
    found = one_run.mitigate(a_cell(faces, "auto"), tmp_path / "run", cache=tmp_path / "cache")
    assert (found.against, found.row["notes"]["kept"]) == ("erm", "plain")
    page = found.page()
    said = " ".join(sentence.text for sentence in page.verdict)
    assert page.verdict[0].text.startswith("Both models are the same")  # the answer comes first
    assert "Selected: plain training" in said
    assert "No groups were used" in said
    assert "Both models are the same" in said
    assert "within classes (area under the ROC curve" in said
    assert not any(isinstance(section, Compared) for section in page.sections)
    tables = next(section for section in page.sections if section.title.startswith("Candidates and selection")).tables
    sizes = [int(row[1]) for row in tables[0].rows]
    assert sum(sizes) == found.row["rows"]["train"]
    assert all(one.value in (0.0, None) for one in found.comparison.differences)
    card = (tmp_path / "run" / "model" / "README.md").read_text(encoding="utf-8")
    assert card.index("Selected: plain training") < card.index("## Limits")
    assert "this model | change" not in card
