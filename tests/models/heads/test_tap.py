"""The tap's own behaviour: every edit, nesting, failures, and models in disguise."""

import copy

import pytest
import torch
from families import FAMILIES, text
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import fairhead
from fairhead.errors import UnsupportedModel
from fairhead.heads import find_sites

VIT = FAMILIES["ViT"]
LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 60,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def vit() -> nn.Module:
    return VIT.build("sdpa")


def llama(**settings: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA, **settings})).eval()


def outputs(model: nn.Module) -> Tensor:
    with torch.no_grad(), fairhead.tap(model) as heads:
        reading = heads.read("output")
        model(**VIT.inputs())
    return reading.stack()  # [L, B, T, H, d]


@pytest.mark.parametrize("tokens", [None, 0, slice(0, 2), [3]], ids=str)
def test_each_edit_does_what_it_says(tokens: object) -> None:
    model = vit()
    before = outputs(model)[0]
    means = {0: torch.randn(4, 8)}
    by_position = {0: torch.randn(5, 4, 8)}
    direction = nn.functional.normalize(torch.randn(8), dim=0)
    remove = torch.eye(8) - torch.outer(direction, direction)
    index = torch.tensor([2, 0, 1])
    edits = {
        "zero": lambda heads: heads.zero([(0, 1)], tokens),
        "scale": lambda heads: heads.scale([(0, 1)], -2.0, tokens),
        "mean": lambda heads: heads.mean([(0, 1)], means, tokens),
        "mean by position": lambda heads: heads.mean([(0, 1)], by_position, tokens),
        "resample": lambda heads: heads.resample([(0, 1)], index, tokens),
        "project": lambda heads: heads.project([(0, 1)], {(0, 1): remove}, {(0, 1): means[0][1]}, tokens),
    }
    x = before[:, :, 1]  # [B, T, d]
    expected = {
        "zero": torch.zeros_like(x),
        "scale": -2 * x,
        "mean": means[0][1].expand_as(x),
        "mean by position": by_position[0][:, 1].expand_as(x),
        "resample": x[index],
        "project": means[0][1] + (x - means[0][1]) @ remove.T,
    }
    for name, edit in edits.items():
        with torch.no_grad(), fairhead.tap(model) as heads:
            edit(heads)
            after = heads.read("output", layers=0)
            model(**VIT.inputs())
        want = before.clone()
        where = slice(None) if tokens is None else tokens
        want[:, where, 1] = expected[name][:, where]
        torch.testing.assert_close(after[0], want, msg=lambda text, name=name: f"{name}: {text}")


def test_a_transform_sees_the_queries_and_keys_that_attention_uses() -> None:
    model = llama()
    seen: list[tuple[int, torch.Size, torch.Size]] = []

    def double(q: Tensor, k: Tensor, site: fairhead.heads.Site) -> tuple[Tensor, Tensor]:
        seen.append((site.layer, q.shape, k.shape))
        return q * 2, k

    with torch.no_grad(), fairhead.tap(model, layers=1) as heads:
        before, q0 = heads.read("weights"), heads.read("q")
        model(**text())
        plain, q_plain = before[1], q0[1]
        heads.transform(double)
        model(**text())
    assert seen == [(1, torch.Size([3, 4, 9, 8]), torch.Size([3, 2, 9, 8]))]
    assert torch.equal(q0[1], q_plain * 2)
    # Twice the query is twice the logit: p becomes p² over its sum.
    torch.testing.assert_close(before[1], plain**2 / (plain**2).sum(-1, keepdim=True), atol=1e-5, rtol=1e-4)


def test_taps_nest_and_reads_show_what_the_model_goes_on_with() -> None:
    model = vit()
    plain = outputs(model)[1]
    with torch.no_grad(), fairhead.tap(model) as outer:
        outer.zero([(1, 0)])
        seen_outside = outer.read("output")
        with fairhead.tap(model, layers=1) as inner:
            inner.scale([(1, 0), (1, 1)], 3.0)
            seen_inside = inner.read("output")
            model(**VIT.inputs())
        expected = plain.clone()
        expected[:, :, 0] = 0
        expected[:, :, 1] *= 3
        assert torch.equal(seen_inside[1], expected)
        assert torch.equal(seen_outside[1], expected)
        model(**VIT.inputs())
        expected[:, :, 1] = plain[:, :, 1]
        assert torch.equal(seen_outside[1], expected)
    assert torch.equal(outputs(model)[1], plain)


def test_taps_may_close_in_any_order() -> None:
    model = vit()
    plain = outputs(model)
    first, second = fairhead.tap(model).open(), fairhead.tap(model).open()
    first.zero([(0, 0)])
    second.zero([(0, 1)])
    first.close()
    edited = outputs(model)[0]
    assert torch.equal(edited[:, :, 0], plain[0][:, :, 0])
    assert not edited[:, :, 1].any()
    second.close()
    assert torch.equal(outputs(model), plain)


@pytest.mark.parametrize("name", ["ViT", "GPT-Neo", "DeBERTa-v2"])
def test_contributions_asked_for_again_are_seen_once_a_pass(name: str) -> None:
    family = FAMILIES[name]
    model = family.build(family.implementations[0])
    with torch.no_grad(), fairhead.tap(model) as outer:
        outer.scale([(0, 0)], 1.0)
        for _ in range(2):
            with fairhead.tap(model) as inner:
                reading = inner.read("contribution", keep="all")
                model(**family.inputs())
    assert [len(reading.calls(layer)) for layer in (0, 1)] == [1, 1]


@pytest.mark.parametrize("name", ["ViT", "GPT-Neo", "DeBERTa-v2"])
def test_an_exception_leaves_no_trace(name: str) -> None:
    family = FAMILIES[name]
    model = family.build(family.implementations[0])
    before = [(n, sorted(vars(m)), len(m._forward_pre_hooks)) for n, m in model.named_modules()]

    def fail(x: Tensor, site: fairhead.heads.Site) -> Tensor:
        raise ZeroDivisionError

    def use() -> None:
        with fairhead.tap(model) as heads:
            heads.read("output")
            heads.edit([(1, 1)], fail)
            model(**family.inputs())

    with pytest.raises(ZeroDivisionError):
        use()
    assert [(n, sorted(vars(m)), len(m._forward_pre_hooks)) for n, m in model.named_modules()] == before
    model(**family.inputs())


def test_gradients_flow_through_what_is_read() -> None:
    model = vit()
    with fairhead.tap(model, layers=0) as heads:
        weights = heads.read("weights", tokens=0)
        model(**VIT.inputs())
        weights[0].square().sum().backward()
    assert find_sites(model)[0].module.q_proj.weight.grad.abs().sum() > 0


def test_left_padding_is_masked_as_eager_masks_it() -> None:
    batch = text("left")
    fast, eager = llama(attn_implementation="sdpa"), llama(attn_implementation="eager")
    with torch.no_grad(), fairhead.tap(fast) as heads:
        weights = heads.read("weights")
        fast(**batch)
        reference = eager(**batch, output_attentions=True).attentions
    real = batch["attention_mask"].bool()
    for layer in range(2):
        torch.testing.assert_close(
            weights[layer].transpose(1, 2)[real], reference[layer].transpose(1, 2)[real], atol=1e-5, rtol=1e-4
        )


def test_generation_with_a_cache() -> None:
    model = llama()
    prompt = {name: tensor[:1] for name, tensor in text().items()}
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    plain = model.generate(**prompt, **settings)
    with fairhead.tap(model) as heads:
        weights = heads.read("weights", tokens=-1, keep="all")
        assert torch.equal(model.generate(**prompt, **settings), plain)
    steps = weights.calls(-1)
    assert [step.shape[-1] for step in steps] == [9, 10, 11, 12, 13]
    for step in steps:
        torch.testing.assert_close(step.sum(-1), torch.ones(1, 4))
    # The same rows in one pass over the finished sequence, without a cache.
    with torch.no_grad(), fairhead.tap(model, layers=-1) as heads:
        rows = heads.read("weights")
        model(plain[:, :-1])
    for position, step in enumerate(steps, start=8):
        torch.testing.assert_close(step, rows[1][:, :, position, : position + 1], atol=1e-5, rtol=1e-4)


def test_an_edit_holds_through_generation() -> None:
    model = llama()
    prompt = {name: tensor[:1] for name, tensor in text().items()}
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    everything = [(layer, head) for layer in range(2) for head in range(4)]
    with fairhead.tap(model) as heads:
        heads.zero(everything)
        cached = model.generate(**prompt, **settings)
        recomputed = model.generate(**prompt, **settings, use_cache=False)
    assert torch.equal(cached, recomputed)
    assert not torch.equal(cached, model.generate(**prompt, **settings))


@pytest.mark.parametrize("name", ["Llama", "GPT-Neo", "DeBERTa-v2"])
def test_edits_and_transforms_may_reckon_in_float32(name: str) -> None:
    family = FAMILIES[name]
    model = family.build(family.implementations[0]).to(torch.bfloat16)
    found = []
    for dtype in (torch.bfloat16, torch.float32):  # halves and doubles are exact in both
        with torch.no_grad(), fairhead.tap(model) as heads:
            heads.edit([(0, 1)], lambda x, site, dtype=dtype: x.to(dtype) * 0.5, tokens=0)
            if family.q_and_k:
                heads.transform(lambda q, k, site, dtype=dtype: (q.to(dtype) * 2, k.to(dtype)))
            found.append(getattr(model(**family.inputs()), family.output))
    assert torch.equal(*found)
    assert found[0].dtype == torch.bfloat16


def test_bfloat16_and_autocast() -> None:
    model = vit()
    batch = VIT.inputs()
    half = copy.deepcopy(model).bfloat16()
    with torch.no_grad(), fairhead.tap(half) as heads:
        contribution = heads.read("contribution")
        weights = heads.read("weights")
        half(**{name: tensor.bfloat16() for name, tensor in batch.items()})
    assert contribution[0].dtype == weights[0].dtype == torch.bfloat16
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), fairhead.tap(model) as heads:
        heads.zero([(0, 0)])
        rows = heads.read("weights", tokens=0)
        model(**batch)
    assert rows[1].isfinite().all()


@pytest.mark.parametrize("what", ["output", "contribution", "weights", "v"])
@pytest.mark.parametrize("name", ["ViT", "BERT", "Llama", "GPT-Neo", "DeBERTa-v2"])
def test_gradient_checkpointing_is_seen_once_and_edited_twice(name: str, what: str) -> None:
    """The second forward of a checkpoint must be edited as the first was, and must not be shown again."""
    family = FAMILIES[name]
    model = family.build(family.implementations[0]).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.config.attention_dropout = model.config.attention_probs_dropout_prob = 0.0

    def gradients() -> tuple[list[Tensor], int]:
        model.zero_grad()
        with fairhead.tap(model) as heads:
            heads.scale([(0, 1), (1, 2)], 0.5)
            reading = heads.read(what, keep="all")
            row = heads.read(what, tokens=0)
            loss = getattr(model(**family.inputs()), family.output).square().mean() + reading[1].square().mean()
            (loss + row[0].square().mean()).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None], len(reading.calls(0))

    plain, _ = gradients()
    model.gradient_checkpointing_enable()
    checkpointed, calls = gradients()
    assert calls == 1
    for a, b in zip(plain, checkpointed, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_torch_compile(fullgraph: bool) -> None:
    """A model compiled before the tap is opened obeys it, and is itself again afterwards."""
    torch._dynamo.reset()
    model = vit()
    batch = VIT.inputs()
    with torch.no_grad():
        plain = model(**batch).last_hidden_state
        with fairhead.tap(model) as heads:
            heads.zero([(0, 1)])
            expected = heads.read("output", tokens=0)
            edited = model(**batch).last_hidden_state
        compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
        torch.testing.assert_close(compiled(**batch).last_hidden_state, plain)
        with fairhead.tap(compiled) as heads:
            heads.zero([(0, 1)])
            reading = heads.read("output", tokens=0)
            torch.testing.assert_close(compiled(**batch).last_hidden_state, edited)
            torch.testing.assert_close(reading[1], expected[1])
        torch.testing.assert_close(compiled(**batch).last_hidden_state, plain)


def test_peft_wrapped_models_and_lora_on_the_projection() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        llama(), peft.LoraConfig(r=2, target_modules=["o_proj", "q_proj"], lora_dropout=0.1, init_lora_weights=False)
    )
    projected: list[Tensor] = []
    model.eval()
    sites = find_sites(model)
    sites[1].projection.register_forward_hook(lambda m, a, out: projected.append(out))
    with torch.no_grad(), fairhead.tap(model) as heads:
        contribution = heads.read("contribution")
        model(**text())
    torch.testing.assert_close(contribution[1].sum(2), projected[0], atol=1e-5, rtol=1e-5)


def test_ddp_wrapped_models(tmp_path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = vit()
        wrapped = nn.parallel.DistributedDataParallel(model)
        with fairhead.tap(wrapped) as heads:
            reading = heads.read("output", tokens=0)
            wrapped(**VIT.inputs()).last_hidden_state.sum().backward()
        assert torch.equal(reading[0], outputs(model)[0][:, 0])
    finally:
        torch.distributed.destroy_process_group()


def test_a_part_of_a_model_can_be_tapped() -> None:
    family = FAMILIES["CLIP"]
    model = family.build("sdpa")
    with torch.no_grad(), fairhead.tap(model.vision_model) as heads:
        reading = heads.read("output")
        model(**family.inputs())
    assert [site.name for site in heads.sites] == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]
    assert reading[0].shape == (3, 5, 4, 8)


def test_dropped_weights_are_not_passed_off_as_weights() -> None:
    family = FAMILIES["GPT-Neo"]
    model = family.build("eager").train()
    for site in find_sites(model):
        site.module.attn_dropout.p = 0.5
    with fairhead.tap(model) as heads:
        heads.read("weights")
        with pytest.raises(UnsupportedModel, match="with dropout while training"):
            model(**family.inputs())


def test_gpt2_with_an_eager_path_of_its_own() -> None:
    config = GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=60, bos_token_id=1, eos_token_id=2)
    config.reorder_and_upcast_attn, config._attn_implementation = True, "eager"
    model = GPT2LMHeadModel(config)
    with fairhead.tap(model) as heads, pytest.raises(UnsupportedModel, match="attn_implementation='sdpa'"):
        heads.read("output")
