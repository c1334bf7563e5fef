"""Reading: tokens chosen in every way, and rows of one token that cost a model next to nothing."""

from collections import Counter

import pytest
import torch
from families import FAMILIES, TOWERS, of
from families import VIT as VIT_SETTINGS
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fairhead

VIT = FAMILIES["ViT"]


def vit() -> nn.Module:
    return VIT.build("sdpa")


def outputs(model: nn.Module) -> Tensor:
    with torch.no_grad(), fairhead.tap(model) as heads:
        reading = heads.read("output")
        model(**VIT.inputs())
    return reading.stack()  # [L, B, T, H, d]


def test_tokens_can_be_chosen_in_every_way() -> None:
    model = vit()
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[0, 4] = mask[1, 2] = mask[2, 0] = True
    full = outputs(model)[1]
    with torch.no_grad(), fairhead.tap(model, layers=-1) as heads:
        readings = {
            "int": heads.read("output", tokens=2),
            "slice": heads.read("output", tokens=slice(1, 3)),
            "list": heads.read("output", tokens=[4, 0]),
            "mask": heads.read("output", tokens=mask),
        }
        model(**VIT.inputs())
    assert torch.equal(readings["int"][-1], full[:, 2])
    assert torch.equal(readings["slice"][1], full[:, 1:3])
    assert torch.equal(readings["list"][1], full[:, [4, 0]])
    assert torch.equal(readings["mask"][1], torch.stack([full[0, 4], full[1, 2], full[2, 0]]))


@pytest.mark.parametrize("what", ["output", "q", "k", "v", "weights"])
@pytest.mark.parametrize("tokens", [0, slice(1, 2), [3]], ids=str)
def test_a_read_row_does_not_keep_the_other_tokens_alive(what: str, tokens: object) -> None:
    with torch.no_grad(), fairhead.tap(model := vit()) as heads:
        reading = heads.read(what, tokens=tokens)
        model(**VIT.inputs())
    assert reading[0].untyped_storage().nbytes() <= 2 * reading[0].nbytes  # rows of both layers, of 5 tokens each


class Operations(TorchDispatchMode):
    """Counts what is asked of the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))


def test_rows_of_all_layers_are_copied_at_once() -> None:
    """A small model on a fast device waits for each launch of a kernel: there is one more, whatever the layers."""
    model = vit()
    with torch.no_grad(), Operations() as plain:
        model(**VIT.inputs())
    with torch.no_grad(), fairhead.tap(model) as heads, Operations() as read:
        heads.read("output", tokens=0)
        model(**VIT.inputs())
    views = {"aten.select.int": 2, "aten.unbind.int": 1}
    assert read.seen - plain.seen == {"aten.stack.default": 1, **views}
    assert not plain.seen - read.seen


def test_rows_are_there_whenever_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the last layer has run, after several passes, without it, and where little may be held back."""
    model, batch = vit(), VIT.inputs()
    expected = outputs(model)[:, :, 2]
    seen: list[Tensor] = []
    with torch.no_grad(), fairhead.tap(model) as heads:
        reading, every = heads.read("output", tokens=2), heads.read("output", tokens=2, keep="all")
        hook = heads.sites[1].module.register_forward_pre_hook(lambda *_: seen.append(reading[0]), with_kwargs=False)
        model(**batch)
        hook.remove()

        def fail(*_: object) -> None:
            raise RuntimeError

        hook = heads.sites[1].module.register_forward_pre_hook(fail)
        for _ in range(2):
            with pytest.raises(RuntimeError):
                model(**batch)
        hook.remove()
        assert [len(every.calls(layer)) for layer in (0, 1)] == [3, 1]
        reading.clear()
        with pytest.raises(LookupError):
            reading[1]
        monkeypatch.setattr("fairhead.heads.requests._HELD_BYTES", 0)
        model(**batch)
    assert torch.equal(seen[0], expected[0])
    assert torch.equal(reading.stack(), expected)
    assert all(torch.equal(row, expected[0]) for row in every.calls(0))


def test_a_row_of_a_pass_that_failed_does_not_take_the_place_of_a_later_one() -> None:
    model, batch = vit(), VIT.inputs()

    def fail(*_: object) -> None:
        raise RuntimeError

    with fairhead.tap(model) as heads:
        reading = heads.read("output", tokens=2)
        hook = heads.sites[1].module.register_forward_pre_hook(fail)
        with torch.no_grad(), pytest.raises(RuntimeError):
            model(pixel_values=2 * batch["pixel_values"])
        hook.remove()
        model(**batch)
    assert torch.equal(reading.stack(), outputs(model)[:, :, 2])
    assert reading[0].requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize(("family", "after"), [("ViT", "attention, at W_O"), ("BERT", "the module")])
def test_a_hook_that_changes_head_outputs_in_place_does_not_change_what_was_read(
    mode: type, family: str, after: str
) -> None:
    model, batch = FAMILIES[family].build("sdpa"), FAMILIES[family].inputs()

    def before_projection(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0][:, 0] = 0

    def after_module(_: nn.Module, __: object, out: tuple[Tensor, ...]) -> None:
        out[0][:, 0] = 0

    with mode(), fairhead.tap(model) as heads:
        for site in heads.sites:
            if after == "the module":
                site.module.register_forward_hook(after_module)
            else:
                site.projection.register_forward_pre_hook(before_projection)
        row, rows = heads.read("output", tokens=0), heads.read("output", tokens=slice(0, 1))
        model(**batch)
    for one, several in zip(row, rows, strict=True):
        assert one.abs().max() > 0
        assert torch.equal(one, several[:, 0])


def test_rows_of_towers_with_different_heads() -> None:
    family = FAMILIES["CLIP"]
    model = of("CLIPModel", "CLIPConfig", **TOWERS | {"vision_config": VIT_SETTINGS | {"num_attention_heads": 2}})(
        "sdpa"
    )
    with torch.no_grad(), fairhead.tap(model) as heads:
        row, everything = heads.read("output", tokens=1), heads.read("output")
        model(**family.inputs())
    assert len({tensor.shape for tensor in row}) == 2
    for one, whole in zip(row, everything, strict=True):
        assert torch.equal(one, whole[:, 1])
