"""The tap where it could be wrong without a word: kernels, caches, copies, wrappers, shared and packed modules."""

import copy
import json

import pytest
import torch
import transformers as hf
from families import FAMILIES, GROUPED, SLIDING, TEXT, of, run, seq2seq, text
from torch import Tensor, nn
from transformers import AttentionInterface

import fairhead
from fairhead.errors import UnsupportedModel
from fairhead.heads import find_sites, output_weight

VIT = FAMILIES["ViT"]


def projected_and_contributed(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What the first layer's projection put out, and the sum of its heads' contributions (its bias left out)."""
    seen: list[Tensor] = []
    site = find_sites(model)[0]
    hook = site.projection.register_forward_hook(lambda m, args, out: seen.append(out))
    with torch.no_grad(), fairhead.tap(model) as heads:
        contribution = heads.read("contribution", layers=0)
        model(**batch)
    hook.remove()
    return seen[0], contribution[0].sum(2)


# --- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:flex_attention called without:UserWarning")
@pytest.mark.parametrize("name", ["Llama", "Gemma-2"])
def test_weights_under_flex_attention_are_those_of_eager(name: str) -> None:
    family = FAMILIES[name]
    flex, eager = family.build("flex_attention"), family.build("eager")
    real = text()["attention_mask"].bool()
    slow = torch.compiler.set_stance("force_eager")  # the same numbers without half a minute of compilation
    with torch.no_grad(), slow, fairhead.tap(flex) as heads, fairhead.tap(eager) as reference:
        rows, expected = heads.read("weights"), reference.read("weights")
        last = heads.read("weights", tokens=-1)
        run(family, flex)
        run(family, eager)
    for layer in range(2):  # a padding query that may see nothing gets zeros here and an even spread there
        got, want = rows[layer].transpose(1, 2), expected[layer].transpose(1, 2)
        torch.testing.assert_close(got[real], want[real], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(last[layer], rows[layer][:, :, -1])


def test_weights_are_refused_where_the_mask_does_not_say_everything() -> None:
    """Flash attention gets its window as an argument: weights computed from the mask alone would look further."""

    def flash_like(module, query, key, value, attention_mask, **kwargs):
        return AttentionInterface()["sdpa"](module, query, key, value, None, **kwargs)

    AttentionInterface.register("flash_like", flash_like)
    try:
        model = of("MistralModel", "MistralConfig", **SLIDING)("sdpa")
        model.config._attn_implementation_internal = "flash_like"
        with torch.no_grad(), fairhead.tap(model) as heads:
            heads.read("output")
            model.layers[0].self_attn(
                torch.randn(1, 6, 32), model.rotary_emb(torch.randn(1, 6, 32), torch.arange(6)[None]), None
            )
            heads.read("weights")
            with pytest.raises(UnsupportedModel, match=r"'flash_like'; call model.set_attn_implementation\('sdpa'\)"):
                model.layers[0].self_attn(
                    torch.randn(1, 6, 32), model.rotary_emb(torch.randn(1, 6, 32), torch.arange(6)[None]), None
                )
    finally:
        AttentionInterface._global_mapping.pop("flash_like")


@pytest.mark.parametrize(("first", "then"), [("eager", "sdpa"), ("sdpa", "eager")])
def test_the_implementation_may_change_while_a_tap_is_open(first: str, then: str) -> None:
    """Masks are made for the new kernel at once: the old one would take sdpa's missing mask for "see everything"."""
    model = of("LlamaModel", "LlamaConfig", **GROUPED)(first)
    batch = {"input_ids": text()["input_ids"]}
    with torch.no_grad():
        plain = model(**batch).last_hidden_state
        with fairhead.tap(model) as heads:
            weights = heads.read("weights")
            model(**batch)
            before = weights.stack()
            model.set_attn_implementation(then)
            torch.testing.assert_close(model(**batch).last_hidden_state, plain)
            torch.testing.assert_close(weights.stack(), before)
        assert model.config._attn_implementation == then
        torch.testing.assert_close(model(**batch).last_hidden_state, plain)


def test_a_family_that_asks_for_the_implementation_by_name_is_refused() -> None:
    """DeepSeek-V3.2 applies its sparse mask under "sdpa" and "eager" alone; under another name it would be lost."""
    model = hf.DeepseekV32Model(hf.DeepseekV32Config(**{**TEXT, "num_hidden_layers": 1}))
    with fairhead.tap(model) as heads, pytest.raises(UnsupportedModel, match="what it can do: nothing"):
        heads.read("output")


# --- caches and generation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        (of("LlamaForCausalLM", "LlamaConfig", **GROUPED), {"cache_implementation": "static", "disable_compile": True}),
        (of("MistralForCausalLM", "MistralConfig", **SLIDING), {}),
        (of("LlamaForCausalLM", "LlamaConfig", **GROUPED), {"num_beams": 3}),
    ],
    ids=["static", "sliding", "beams"],
)
def test_rows_read_during_generation_are_those_of_one_long_pass(build, settings: dict) -> None:
    model = build("sdpa")
    prompt = {name: tensor[:1] for name, tensor in text().items()}
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, **settings}
    plain = model.generate(**prompt, **settings)
    with fairhead.tap(model) as heads:
        outputs = heads.read("output", tokens=-1, keep="all")
        assert torch.equal(model.generate(**prompt, **settings), plain)
    steps = outputs.calls(-1)
    with torch.no_grad(), fairhead.tap(model) as heads:
        whole = heads.read("output", layers=-1)
        model(plain[:, :-1])
    assert len(steps) == 6
    # The first step has seen the prompt only; later steps of a beam search may belong to beams that were dropped.
    compared = steps[:1] if "num_beams" in settings else steps
    for position, step in enumerate(compared, start=8):
        torch.testing.assert_close(step[:1], whole[-1][:, position], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("what", ["k", "v"])
def test_keys_and_values_of_a_step_are_not_written_over_by_the_next(what: str) -> None:
    """A static cache is one tensor that every step writes into."""
    model = of("LlamaForCausalLM", "LlamaConfig", **GROUPED)("sdpa")
    prompt = {name: tensor[:1] for name, tensor in text().items()}
    settings = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "disable_compile": True}
    with fairhead.tap(model) as heads:
        reading = heads.read(what, keep="all")
        model.generate(**prompt, **settings)
        growing = reading.calls(0)
        reading.clear()
        model.generate(**prompt, **settings, cache_implementation="static")
    assert len(growing) == 3
    for step, seen in zip(growing, reading.calls(0), strict=True):
        length = step.shape[2]
        torch.testing.assert_close(seen[:, :, :length], step, atol=1e-6, rtol=1e-5)
        assert not seen[:, :, length:].any()  # nothing of later steps


def test_cross_attention_and_its_cache() -> None:
    """The second step of a decoder reads cross-attention from the cache; the rows must be those of a full pass."""
    model = of("T5ForConditionalGeneration", "T5Config", d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4,
               vocab_size=60)("sdpa")  # fmt: skip
    batch = seq2seq()
    cross = next(site.layer for site in find_sites(model) if "EncDec" in site.name)
    with torch.no_grad(), fairhead.tap(model) as heads:
        rows = heads.read("weights", layers=cross)
        model(**batch)
        full = rows[cross]
        decoder = batch.pop("decoder_input_ids")
        first = model(**batch, decoder_input_ids=decoder[:, :2], use_cache=True)
        model(**batch, decoder_input_ids=decoder[:, 2:], past_key_values=first.past_key_values)
    assert full.shape == (3, 4, 3, 9)
    torch.testing.assert_close(rows[cross], full[:, :, 2:], atol=1e-6, rtol=1e-5)
    assert not full[2, :, :, 4:].any()  # the encoder's padding


# --- copies, files, wrappers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ViT", "GPT-Neo", "DeBERTa-v2"])
def test_a_copy_has_requests_of_its_own(name: str) -> None:
    family = FAMILIES[name]
    model = family.build(family.implementations[0])
    with torch.no_grad():
        plain = run(family, model)
        with fairhead.tap(model) as heads:
            heads.zero([(0, 0)])
            seen = heads.read("output", keep="all")
            edited = run(family, model)
            twin = copy.deepcopy(model)
            assert torch.equal(run(family, twin), edited)
            assert len(seen.calls(0)) == 1
        assert torch.equal(run(family, model), plain)
        assert torch.equal(run(family, twin), edited)
        with fairhead.tap(twin) as heads:
            reading = heads.read("output")
            run(family, twin)
        assert not reading[0][:, :, 0].any()


def test_saving_while_a_tap_is_open_saves_no_trace(tmp_path) -> None:
    model = VIT.build("sdpa")
    model.save_pretrained(tmp_path / "plain")
    with fairhead.tap(model) as heads:
        heads.zero([(0, 0)])
        heads.read("contribution")
        model.save_pretrained(tmp_path / "tapped")
        assert not [key for key in model.state_dict() if "fairhead" in key]
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "tapped" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert "fairhead" not in json.dumps(json.loads((tmp_path / "tapped" / "config.json").read_text()))


@pytest.mark.parametrize(
    "name", ["ViT", "GPT-Neo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("DeBERTa-v2", "MPNet"))]
)
def test_a_model_compiled_before_obeys_every_request_made_later(name: str) -> None:
    torch.compiler.reset()
    family = FAMILIES[name]
    model = family.build(family.implementations[0])
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        plain = run(family, compiled)
        with fairhead.tap(model) as heads:
            for head in range(3):  # requests change between calls
                heads.scale([(0, head)], 0.5)
                output, contribution = heads.read("output", tokens=head), heads.read("contribution")
                expected = run(family, model), output[0], contribution[0]
                got = run(family, compiled), output[0], contribution[0]
                for a, b in zip(got, expected, strict=True):
                    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
            assert not torch.allclose(got[0], plain, atol=1e-4)
        torch.testing.assert_close(run(family, compiled), plain, atol=1e-5, rtol=1e-4)


def test_contributions_of_offloaded_and_quantised_projections() -> None:
    accelerate = pytest.importorskip("accelerate")
    offloaded = VIT.build("sdpa")
    bias = find_sites(offloaded)[0].projection.bias.detach().clone()
    accelerate.cpu_offload(offloaded, execution_device="cpu")
    assert find_sites(offloaded)[0].projection.weight.is_meta
    projected, contributed = projected_and_contributed(offloaded, VIT.inputs())
    torch.testing.assert_close(contributed + bias, projected, atol=1e-5, rtol=1e-5)

    quantised = of("LlamaModel", "LlamaConfig", **GROUPED)("sdpa")
    for layer in quantised.layers:
        layer.self_attn.o_proj = Int8Linear(layer.self_attn.o_proj)
    projected, contributed = projected_and_contributed(quantised, text())
    torch.testing.assert_close(contributed, projected, atol=1e-5, rtol=1e-5)


class Int8Linear(nn.Module):
    """As quantisation libraries have it: integers for weights, floats in and out."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.in_features = linear.in_features
        self.scale = weight.abs().max().item() / 127
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale).T


def test_probing_a_projection_leaves_its_modes_alone() -> None:
    model = VIT.build("sdpa").train()
    site = find_sites(model)[0]
    nn.utils.parametrizations.weight_norm(site.projection)
    list(site.projection.modules())[-1].eval()
    modes = [module.training for module in model.modules()]
    weight = output_weight(site)
    assert [module.training for module in model.modules()] == modes
    torch.testing.assert_close(weight.flatten(1), site.projection.weight)


def test_threads_of_data_parallel_are_refused() -> None:
    wrapped = nn.DataParallel(VIT.build("sdpa"))
    fairhead.tap(wrapped)  # no device, one copy
    wrapped.device_ids = [0, 1]
    with pytest.raises(UnsupportedModel, match=r"tap model\.module, or use DistributedDataParallel"):
        fairhead.tap(wrapped)


def test_a_reading_without_gradients_is_not_passed_off_as_one_with_them() -> None:
    """The forward pass of a re-entrant checkpoint records nothing: a loss on what is read would train nothing."""
    model = VIT.build("sdpa").train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with fairhead.tap(model) as heads:
        heads.scale([(0, 0)], 0.5)
        run(VIT, model)
        heads.read("weights", tokens=0)
        with pytest.raises(UnsupportedModel, match="'use_reentrant': False"):
            run(VIT, model)
        model.eval()
        run(VIT, model)


# --- modules that are not one layer each -----------------------------------------------------------------------------


def test_readings_of_shared_layers_are_refused_and_edits_hold_for_all() -> None:
    model = of("AlbertModel", "AlbertConfig", **TEXT, embedding_size=16)("sdpa")
    site = find_sites(model)[0]
    with torch.no_grad(), fairhead.tap(model) as heads:
        with pytest.raises(UnsupportedModel, match=r"layers share its weights.*what it can do: edit, transform"):
            heads.read("output")
        heads.zero([(0, 2)])
        edited = model(**text()).last_hidden_state

    def silence(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        joined = args[0].clone()
        joined[..., 2 * site.head_dim : 3 * site.head_dim] = 0
        return (joined,)

    site.projection.register_forward_pre_hook(silence)
    with torch.no_grad():
        torch.testing.assert_close(edited, model(**text()).last_hidden_state)


def test_readings_of_packed_images_are_refused_and_edits_hold_for_each() -> None:
    """Qwen2-VL sends all images as one sequence and calls attention once an image: a reading would be the last's."""
    model_class = hf.Qwen2_5_VisionTransformerPretrainedModel
    config = hf.Qwen2_5_VLVisionConfig(
        depth=1, hidden_size=32, out_hidden_size=32, num_heads=4, intermediate_size=40, patch_size=4, window_size=16
    )
    model = model_class(config).eval()
    pixels, grid = torch.randn(8, 96), torch.tensor([[1, 2, 2], [1, 2, 2]])
    with torch.no_grad(), fairhead.tap(model) as heads:
        with pytest.raises(UnsupportedModel, match="gets a batch as one sequence"):
            heads.read("output")
        plain = model(pixels, grid_thw=grid).last_hidden_state
        heads.zero([(0, head) for head in range(4)])
        silent = model(pixels, grid_thw=grid).last_hidden_state
    projection = find_sites(model)[0].projection
    projection.register_forward_pre_hook(lambda _, args: (torch.zeros_like(args[0]),))
    with torch.no_grad():
        torch.testing.assert_close(silent, model(pixels, grid_thw=grid).last_hidden_state)
    assert not torch.allclose(silent, plain)


def test_means_by_position_follow_a_mask() -> None:
    model = VIT.build("sdpa")
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[0, 1] = mask[2, 4] = True
    means = torch.randn(5, 4, 8)
    with torch.no_grad(), fairhead.tap(model) as heads:
        heads.mean([(0, 3)], {0: means}, mask)
        after = heads.read("output", layers=0)
        run(VIT, model)
    assert torch.equal(after[0][mask][:, 3], means[[1, 4], 3])
