"""What may be asked of a tap, and what is told to whoever asks for something else."""

import pytest
import torch
from families import FAMILIES, run
from torch import nn

import fairhead
from fairhead.errors import InputError, UnsupportedModel

VIT = FAMILIES["ViT"]


def vit() -> nn.Module:
    return VIT.build("sdpa")


@pytest.mark.parametrize(
    ("name", "what", "words"),
    [
        ("DeBERTa-v2", "q", "DisentangledSelfAttention of deberta-v2 .* cannot read 'q'; what it can do: contribution"),
        ("MPNet", "weights", "MPNetSelfAttention of mpnet .* cannot read 'weights'"),
    ],
)
def test_what_a_family_cannot_do_is_named(name: str, what: str, words: str) -> None:
    model = FAMILIES[name].build("eager")
    with fairhead.tap(model) as heads, pytest.raises(UnsupportedModel, match=words):
        heads.read(what)
    with fairhead.tap(model) as heads, pytest.raises(UnsupportedModel, match="cannot transform q and k"):
        heads.transform(lambda q, k, site: (q, k))


def test_a_model_without_attention_is_named() -> None:
    with pytest.raises(UnsupportedModel, match="Sequential has no attention layer"):
        fairhead.tap(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda heads: heads.read("querys"), "cannot read 'querys'; expected one of q, k, v"),
        (lambda heads: heads.read("weight"), "Did you mean 'weights'"),
        (lambda heads: heads.read("weights", tokens=torch.ones(3, 5, dtype=torch.bool)), "bool mask"),
        (lambda heads: heads.read("q", tokens=torch.ones(3, 5)), "float32 tensor of shape \\[3, 5\\]"),
        (lambda heads: heads.zero([(2, 0)]), "layer 2 does not exist: the model has 2 attention layers"),
        (lambda heads: heads.zero([(0, 0)]), "layer 0 is not tapped: the tap was opened on \\[1\\]"),
        (lambda heads: heads.zero([(1, 4)]), "head 4 does not exist: layer 1 has 4 heads"),
        (lambda heads: heads.mean([(1, 0)], {0: torch.zeros(4, 8)}), "no mean was given for layer 1"),
        (lambda heads: heads.mean([(1, 0)], {1: torch.zeros(8)}), "has shape \\[8\\]; expected \\[4, 8\\]"),
        (lambda heads: heads.project([(1, 0)], {}), "no matrix was given for layer 1, head 0"),
        (
            lambda heads: heads.project([(1, 0)], {(1, 0): torch.eye(7)}),
            "head 0 has shape \\[7, 7\\]; expected \\[8, 8\\]",
        ),
        (
            lambda heads: heads.project([(1, 0)], {(1, 0): torch.eye(8)}, {(1, 0): torch.zeros(4)}),
            "the mean of layer 1, head 0 has shape \\[4\\]; expected \\[8\\]",
        ),
        (lambda heads: heads.resample([(1, 0)], torch.tensor([0, 1, 3])), "expected the number of an example"),
        (lambda heads: heads.resample([(1, 0)], [0, -1, 1]), "expected the number of an example"),
        (lambda heads: heads.resample([(1, 0)], torch.zeros(3)), "expected the number of an example"),
        (lambda heads: heads.resample([(1, 0)], [0, 1, 2], torch.ones(3, 5, dtype=torch.bool)), "bool mask"),
        (lambda heads: heads.zero((1, 0)), "expected \\(layer, head\\) pairs"),
        (lambda heads: heads.zero([(1, 0.5)]), "expected \\(layer, head\\) pairs"),
        (lambda heads: heads.read("output", keep="first"), "keep is 'first'; expected 'last' or 'all'"),
    ],
)
def test_bad_requests_say_what_is_wrong(ask, words: str) -> None:
    with fairhead.tap(vit(), layers=1) as heads, pytest.raises(InputError, match=words):
        ask(heads)


def test_a_request_that_is_refused_leaves_nothing_behind() -> None:
    model = vit()
    with torch.no_grad(), fairhead.tap(model) as heads:
        plain = run(VIT, model)
        with pytest.raises(InputError, match="no mean was given for layer 1"):
            heads.mean([(0, 0), (1, 0)], {0: torch.zeros(4, 8)})
        assert torch.equal(run(VIT, model), plain)


@pytest.mark.parametrize("model", [None, "bert-base-uncased", nn.Linear])
def test_what_is_no_model_is_named(model: object) -> None:
    with pytest.raises(InputError, match="expected a model that is loaded"):
        fairhead.tap(model)


def test_pairs_may_come_from_anything_that_yields_them() -> None:
    model = vit()
    with torch.no_grad(), fairhead.tap(model) as heads:
        heads.mean(zip([0, 0], [1, 3], strict=True), {0: torch.full((4, 8), 0.5)})
        heads.project(iter([(0, 2)]), {(0, 2): torch.zeros(8, 8)})
        after = heads.read("output", layers=[0, -2])
        run(VIT, model)
    assert after.layers == [0]
    assert torch.equal(after[0][:, :, [1, 2, 3]].mean((0, 1, 3)), torch.tensor([0.5, 0.0, 0.5]))


def test_a_closed_tap_takes_no_requests_and_unseen_layers_say_so() -> None:
    model = vit()
    with fairhead.tap(model) as heads:
        reading = heads.read("output")
    with pytest.raises(InputError, match="the tap is closed"):
        heads.read("output")
    with pytest.raises(LookupError, match="no forward pass has reached it"):
        reading[0]


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda heads: heads.read("output", tokens=5), "token 5 does not exist: this pass has 5 tokens"),
        (lambda heads: heads.read("weights", tokens=-6), "token -6 does not exist"),
        (lambda heads: heads.read("q", tokens=[0, 7]), "token 7 does not exist"),
        (lambda heads: heads.read("k", tokens=torch.tensor([8])), "token 8 does not exist"),
        (lambda heads: heads.zero([(0, 0)], tokens=9), "token 9 does not exist"),
        (
            lambda heads: heads.read("output", tokens=torch.ones(2, 5, dtype=torch.bool)),
            r"mask of tokens has shape \[2, 5\]; this pass has \[batch, tokens\] = \[3, 5\]",
        ),
        (
            lambda heads: heads.edit([(0, 0)], lambda x, site: x.mean(0)),
            r"edit of layer 0 returned shape \[5, 1, 8\]; expected .* \[3, 5, 1, 8\]",
        ),
        (lambda heads: heads.edit([(0, 0)], lambda x, site: None), "edit of layer 0 returned NoneType; expected"),
        (lambda heads: heads.resample([(0, 0)], torch.tensor([0])), "index has 1 examples and this batch 3"),
        (lambda heads: heads.mean([(0, 0)], {0: torch.zeros(7, 4, 8)}), "is for 7 positions.*this pass has 5"),
        (lambda heads: heads.transform(lambda q, k, site: q), r"returned Tensor; expected the pair \(q, k\)"),
        (lambda heads: heads.transform(lambda q, k, site: (q[:, :1], k)), r"returned q and k of shapes \[3, 1, 5, 8\]"),
    ],
)
def test_requests_that_do_not_fit_a_pass_are_told(ask, words: str) -> None:
    model = vit()
    with torch.no_grad(), fairhead.tap(model) as heads:
        ask(heads)
        with pytest.raises(InputError, match=words):
            run(VIT, model)
    run(VIT, model)


@pytest.mark.parametrize("tokens", ["first", 0.0, [0.5], torch.tensor(0.0)], ids=str)
def test_tokens_of_the_wrong_kind_are_told(tokens: object) -> None:
    with fairhead.tap(vit()) as heads, pytest.raises(InputError, match="expected a position, a slice"):
        heads.read("output", tokens=tokens)


def test_numbers_of_numpy_are_numbers() -> None:
    import numpy as np

    model = vit()
    with torch.no_grad(), fairhead.tap(model, layers=np.int64(1)) as heads:
        one, several = heads.read("output", tokens=np.int64(2)), heads.read("output", tokens=np.array([2, 0]))
        run(VIT, model)
    assert torch.equal(several[1][:, 0], one[1])
    with pytest.raises(InputError, match="layers is 'last'"):
        fairhead.tap(model, layers="last")


def test_no_layers_at_all_is_an_idle_tap() -> None:
    model = vit()
    with torch.no_grad():
        plain = run(VIT, model)
        with fairhead.tap(model, layers=[]) as heads:
            assert len(heads.read("output")) == 0
            assert torch.equal(run(VIT, model), plain)
