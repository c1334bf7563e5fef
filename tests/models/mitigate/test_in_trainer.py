"""Methods within a Hugging Face `Trainer`: the same step however it is split, and checkpoints that are loaded whole."""

import os
import warnings
from contextlib import nullcontext
from functools import cache

import pytest
import torch
import torch.distributed
import transformers as hf
from classifiers import FAMILIES, batch, build, without_dropout
from safetensors.torch import load_file, save_file
from several_processes import as_launched, in_processes
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import SequentialSampler

from fairhead.errors import InputError
from fairhead.mitigate import DAM, attach, balance_weights, draw_by_weight, match_weights
from fairhead.train.loop import gathered

METHODS = ("dam", "balance", "match")
# (processes, batches) that a step is split into.
SPLITS = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2))
# In `make test` a family whose loss minds the rows of all batches, and one whose loss ignores them.
SOME = ("ViT", "BERT")


class Gradients(hf.TrainerCallback):
    """Those of the first step."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **more):
        self.found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def rows_of(family, count=48):
    found = batch(family, rows=count)
    return [{name: values[i] for name, values in found.items()} for i in range(count)]


@cache
def weights_of(method):
    """Far from even: rows of one half and class are rare, and are not in the deployment sample."""
    chance = torch.Generator().manual_seed(0)
    labels = torch.arange(48) % 3
    half = (torch.rand(48, generator=chance) < torch.tensor([0.8, 0.5, 0.2])[labels]).long()
    features = torch.randn(48, 4, generator=chance) + 6 * half[:, None]
    if method == "balance":
        return balance_weights(features, labels, 2)
    return match_weights(features, labels, features[half == 0].repeat(4, 1), labels[half == 0].repeat(4)).weights


def trainer_of(model, rows, folder, **options):
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    return hf.Trainer(model, hf.TrainingArguments(str(folder), **{**quiet, **options}), train_dataset=rows)


def gradients(family, method, processes, batches, folder):
    """Of one step, by name.

    DAM's statistics and its alignment are those of a batch, so that its step is over copies of one batch.
    """
    model = without_dropout(build(family))
    rows = rows_of(family)[:8] * batches if method == "dam" else rows_of(family)
    trainer = trainer_of(
        attach(model, DAM(values=3)) if method == "dam" else model,
        rows,
        folder,
        per_device_train_batch_size=8 // processes if method == "dam" else 16 // processes // batches,
        gradient_accumulation_steps=batches,
        max_steps=1,
        max_grad_norm=0.0,
    )
    if method == "dam":
        trainer._get_train_sampler = lambda *_: SequentialSampler(rows)
    else:
        draw_by_weight(trainer, weights_of(method))
    seen = Gradients()
    trainer.add_callback(seen)
    trainer.train()
    return seen.found


def without_a_trainer(rank, processes):
    """DAM's gradients and statistics, of the rows of this process."""
    model = without_dropout(attach(build("BERT"), DAM()).train())
    part = {name: tensor[rank::processes] for name, tensor in batch("BERT").items()}
    parallel = DistributedDataParallel(model) if processes > 1 else model  # without a name it would be gone too soon
    loss = parallel(**part).loss
    loss.backward()
    key = model.bert.encoder.layer[-1].attention.self.key.weight.grad
    found = {"mean": model.dam.k.mean, "deviation": model.dam.q.deviation, "gradient": key}
    return {**found, "projection": model.dam.project[0].weight.grad, "loss": loss.detach()}


def uneven(rank, device="cpu"):
    """As many rows as a last batch happens to have."""
    rows = torch.full((2 + rank, 3), 1.0 + rank, requires_grad=True, device=device)
    (gathered(rows) ** 2).sum().backward()
    return {"rows": gathered(rows.detach()).cpu(), "gradient": rows.grad.cpu()}


def check_uneven(halves):
    """Two rows of ones and three of twos; each is in the losses of both."""
    for rank, half in enumerate(halves):
        assert half["rows"][:, 0].tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
        assert half["gradient"].tolist() == [[4.0 * (1 + rank)] * 3] * (2 + rank)


def one_of_two_gpus(rank, folder, port):
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.save(uneven(rank, f"cuda:{rank}"), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def one_of_two(rank, families, folder, port):
    warnings.simplefilter("error")
    os.environ |= as_launched(rank, 2, port)
    found = {
        (family, method, *split): gradients(family, method, *split, folder / "trainer")
        for family in families
        for method in METHODS
        for split in SPLITS
        if split[0] == 2
    }
    found |= {"without a trainer": without_a_trainer(rank, 2), "uneven": uneven(rank)}
    torch.save(found, folder / f"{rank}.pt")
    os._exit(0)  # now and then gloo's threads never end, and the process would wait for them


def on_two_processes(work, *arguments):
    """What each of two processes has found."""
    in_processes(work, *arguments)
    return [torch.load(arguments[-1] / f"{rank}.pt") for rank in range(2)]


def same_step(families, found, folder):
    for family in families:
        for method in METHODS:
            alone = [split for split in SPLITS if split[0] == 1]
            found |= {(family, method, *split): gradients(family, method, *split, folder) for split in alone}
            whole = found[family, method, 1, 1]
            assert (method == "dam") == any("dam.project" in name for name in whole)
            assert max(gradient.abs().max() for gradient in whole.values()) > 1e-3
            for split in SPLITS:
                part, where = found[family, method, *split], f"{family}, {method}, {split}"
                assert part.keys() == whole.keys()
                for name, gradient in whole.items():
                    close = torch.isclose(part[name], gradient, rtol=1e-3, atol=1e-6)
                    assert close.all(), f"{where}: {name} {part[name].norm() / gradient.norm()}"


def test_a_step_is_the_same_however_it_is_split(tmp_path):
    """Over batches and processes, with a Trainer and without; all on two processes at once, as those start slowly."""
    first, second = on_two_processes(one_of_two, SOME, tmp_path)
    same_step(SOME, dict(first), tmp_path)
    one, halves = without_a_trainer(0, 1), [first["without a trainer"], second["without a trainer"]]
    for half in halves:
        for name in ("mean", "deviation", "gradient", "projection"):
            torch.testing.assert_close(half[name], one[name], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close((halves[0]["loss"] + halves[1]["loss"]) / 2, one["loss"])
    check_uneven([first["uneven"], second["uneven"]])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_uneven_batches_of_two_gpus_are_gathered(tmp_path):
    check_uneven(on_two_processes(one_of_two_gpus, tmp_path))


@pytest.mark.slow
def test_a_step_of_every_family_is_the_same_however_it_is_split(tmp_path):
    families = tuple(FAMILIES)
    same_step(families, on_two_processes(one_of_two, families, tmp_path)[0], tmp_path)


def test_rows_are_drawn_by_weight_and_anew_in_each_epoch(tmp_path):
    trainer = trainer_of(build("ViT"), rows_of("ViT"), tmp_path, per_device_train_batch_size=48)
    weights = torch.zeros(48)
    weights[3], weights[5] = 1.0, 3.0
    draw_by_weight(trainer, weights)
    loader = trainer.get_train_dataloader()
    drawn = []
    for epoch in range(40):
        loader.set_epoch(epoch)
        drawn.append(next(iter(loader.batch_sampler)))
    assert {row for epoch in drawn for row in epoch} == {3, 5}
    assert len({tuple(epoch) for epoch in drawn}) == 40
    assert sum(epoch.count(5) for epoch in drawn) / (40 * 48) == pytest.approx(0.75, abs=0.04)
    with pytest.raises(InputError, match=r"48 training rows and there are weights of shape \[47\]"):
        draw_by_weight(trainer, weights[1:])


@pytest.mark.parametrize("family", ["ViT", "DINOv2", "BERT"])  # transformers renames weights of the first two
def test_a_checkpoint_is_loaded_whole_or_refused(family, tmp_path):
    """Trainings of a model that carries a method: resumed, it becomes what it would have become."""

    def trainer(steps, **options):
        model = attach(build(family), DAM())
        with torch.no_grad():
            model.dam.project[0].weight.fill_(0.1 * len(options))  # what a checkpoint lacks would show
        options = {"max_steps": steps, "per_device_train_batch_size": 8, "learning_rate": 0.01, **options}
        return trainer_of(model, rows_of(family), tmp_path, save_strategy="steps", save_steps=2, **options)

    whole = trainer(4)
    whole.train()
    resumed = trainer(4, lr_scheduler_type="linear")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], tensor, rtol=1e-4, atol=1e-6, msg=name)

    file = tmp_path / "checkpoint-2" / "model.safetensors"
    kept = load_file(file)
    lost = next(name for name in kept if "layer.0" in name)
    del kept[lost]
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"the checkpoint lacks 1 weights that this \w+ needs, such as \w+\..*layer"):
        trainer(4).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize("how", ["label_smoothing_factor", "compute_loss_func"])
def test_a_trainer_that_keeps_labels_from_the_model_is_told_that_dam_needs_them(how, tmp_path):
    """Its own loss takes the place of the model's, to which DAM adds its term."""
    options = {"max_steps": 1, **({how: 0.1} if how == "label_smoothing_factor" else {})}
    for dam, refused in ((DAM(), True), (DAM(alignment_weight=0), False)):
        trainer = trainer_of(attach(build("ViT"), dam), rows_of("ViT"), tmp_path, **options)
        if how == "compute_loss_func":
            trainer.compute_loss_func = lambda output, labels, **more: output.logits.square().mean()
        with pytest.raises(InputError, match=rf"{how}.*alignment_weight=0") if refused else nullcontext():
            trainer.train()
