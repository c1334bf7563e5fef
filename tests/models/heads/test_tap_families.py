"""Conformance: what the tap promises, over every family and every attention implementation it can be loaded with."""

import pytest
import torch
from families import TAP_FAMILIES, Family, run
from torch import Tensor, nn

import fairhead
from fairhead.heads import Site, find_sites

CASES = [
    pytest.param(family, implementation, id=f"{name}-{implementation}")
    for name, family in TAP_FAMILIES.items()
    for implementation in family.implementations
]
every_case = pytest.mark.parametrize(("family", "implementation"), CASES)
every_family = pytest.mark.parametrize("family", TAP_FAMILIES.values(), ids=TAP_FAMILIES.keys())


def traces(model: nn.Module) -> list[tuple[str, list[str], str, int]]:
    """All that a tap could leave behind on a model: attributes, configs, hooks."""
    return [
        (
            name,
            sorted(vars(module)),
            str(getattr(getattr(module, "config", None), "_attn_implementation", None)),
            len(module._forward_hooks) + len(module._forward_pre_hooks),
        )
        for name, module in model.named_modules()
    ]


@every_case
def test_an_idle_tap_changes_nothing(family: Family, implementation: str) -> None:
    model = family.build(implementation)
    before = traces(model)
    with torch.no_grad():
        plain = run(family, model)
        with fairhead.tap(model):
            assert torch.equal(run(family, model), plain)
            assert traces(model) == before


@every_case
def test_reading_everything_changes_nothing_and_leaves_no_trace(family: Family, implementation: str) -> None:
    model = family.build(implementation)
    before = traces(model)
    can = find_sites(model)[0].route.can - {"transform", "edit"}
    with torch.no_grad():
        plain = run(family, model)
        with fairhead.tap(model) as heads:
            readings = [heads.read(what) for what in sorted(can)]
            assert torch.equal(run(family, model), plain)
    assert traces(model) == before
    assert all(len(list(reading)) == len(heads.sites) for reading in readings)


@pytest.mark.parametrize("rows", [None, 0, -1, slice(1, 3), [2, 0]], ids=str)
@pytest.mark.parametrize(("family", "implementation"), [case for case in CASES if case.values[0].weights])
def test_weights_are_those_of_eager_attention(family: Family, implementation: str, rows: object) -> None:
    eager = family.build("eager")
    expected: dict[int, Tensor] = {}
    for site in find_sites(eager):
        site.module.register_forward_hook(_keep_weights(expected, site))
        if site.family == "DisentangledSelfAttention":
            site.module.register_forward_pre_hook(
                lambda _, args, kwargs: ((*args[:2], True, *args[3:]), kwargs), with_kwargs=True
            )
    model = family.build(implementation)
    with torch.no_grad(), fairhead.tap(model) as heads:
        weights = heads.read("weights", tokens=rows)
        run(family, eager)
        run(family, model)
    assert len(expected) == len(heads.sites)
    for layer, reference in expected.items():
        chosen = reference if rows is None else reference[:, :, rows]
        torch.testing.assert_close(weights[layer], chosen, atol=1e-5, rtol=1e-4)


def _keep_weights(kept: dict[int, Tensor], site: Site):
    def hook(_: nn.Module, __: object, outputs: tuple) -> None:
        # The weights are the last of what an eager module returns: [B, H, Q, K].
        kept[site.layer] = next(o for o in reversed(outputs) if isinstance(o, Tensor))

    return hook


@every_case
def test_contributions_sum_to_the_attention_output(family: Family, implementation: str) -> None:
    model = family.build(implementation)
    projected: dict[int, Tensor] = {}
    for site in find_sites(model):
        site.projection.register_forward_hook(lambda m, a, out, layer=site.layer: projected.update({layer: out}))
    with torch.no_grad(), fairhead.tap(model) as heads:
        everywhere = heads.read("contribution")
        first = heads.read("contribution", tokens=0)
        run(family, model)
    for site in heads.sites:
        bias = getattr(site.projection, "bias", None)
        total = everywhere[site.layer].sum(2) + (0 if bias is None else bias)
        torch.testing.assert_close(total, projected[site.layer], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(first[site.layer], everywhere[site.layer][:, 0], atol=1e-5, rtol=1e-5)


@every_family
def test_editing_nothing_changes_nothing(family: Family) -> None:
    model = family.build(family.implementations[0])
    with torch.no_grad():
        plain = run(family, model)
        with fairhead.tap(model) as heads:
            everything = [(site.layer, head) for site in heads.sites for head in range(site.n_heads)]
            heads.zero([])
            heads.scale(everything, 1.0)
            heads.resample(everything, torch.arange(3))
            heads.project(everything, {(layer, h): torch.eye(heads.sites[0].head_dim) for layer, h in everything})
            torch.testing.assert_close(run(family, model), plain, atol=1e-6, rtol=1e-6)


@every_family
def test_zeroing_a_head_zeroes_its_part_of_the_projection_input(family: Family) -> None:
    model = family.build(family.implementations[0])
    with torch.no_grad(), fairhead.tap(model) as heads:
        heads.zero([(-1, 2)])
        edited = run(family, model)
    last = find_sites(model)[-1]

    def silence(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        joined = args[0].clone()
        joined[..., 2 * last.head_dim : 3 * last.head_dim] = 0
        return (joined,)

    with torch.no_grad():
        plain = run(family, model)
        last.projection.register_forward_pre_hook(silence)
        torch.testing.assert_close(edited, run(family, model), atol=1e-6, rtol=1e-5)
    assert not torch.allclose(edited, plain, atol=1e-4)


@pytest.mark.parametrize(
    # T5 adds a learned position bias to its scores, so they are not equal without queries.
    "family",
    [pytest.param(family, id=name) for name, family in TAP_FAMILIES.items() if family.q_and_k and name != "T5"],
)
def test_without_queries_attention_is_even_over_what_may_be_seen(family: Family) -> None:
    """q = 0 makes every score equal: only masks and position biases are left, so the answer is known."""
    model = family.build(family.implementations[0])
    with torch.no_grad(), fairhead.tap(model) as heads:
        plain = heads.read("weights")
        run(family, model)
        # A weight may underflow to 0 in one head, hardly in all of them.
        seen = [(weights > 0).any(1, keepdim=True).expand_as(weights) for weights in plain]
        heads.transform(lambda q, k, site: (torch.zeros_like(q), k))
        even = heads.read("weights")
        run(family, model)
    for visible, weights in zip(seen, even, strict=True):
        torch.testing.assert_close(weights, visible / visible.sum(-1, keepdim=True), atol=1e-5, rtol=1e-5)


@every_family
def test_gradients_are_equal(family: Family) -> None:
    model = family.build(family.implementations[0])

    def gradients() -> list[Tensor | None]:
        model.zero_grad()
        run(family, model).square().mean().backward()
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    plain = gradients()
    with fairhead.tap(model) as heads:
        for what in heads.sites[0].route.can - {"transform", "edit"}:
            heads.read(what)
        tapped = gradients()
    for a, b in zip(plain, tapped, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
