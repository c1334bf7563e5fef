"""KLAAD's losses against a computation by hand from eager attention, in each family."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from language_models import FAMILIES, ITEMS, build, item, tokenizer

from fairhead.errors import InputError
from fairhead.heads import tap
from fairhead.language.row_layout import Layout
from fairhead.mitigate.klaad import KLAAD, NO_ROWS, attention_divergence, losses, pool, triplet_loss
from fairhead.mitigate.language_trainer import LanguageTrainer
from fairhead.mitigate.triplets import batch_of
from fairhead.train import LanguagePlan

FAMILY_NAMES = list(FAMILIES)


def klaad(model, config, items=ITEMS):
    examples = config.prepare(items, tokenizer(), 32).examples
    with config.session(model) as loss:
        return loss(examples)


def by_hand(model, config, items=ITEMS):
    """Every sentence by itself, every sum written out; eager attention through `output_attentions`."""
    encode = tokenizer()
    ce, kl, triplets = [[], []], [], []
    for one in items:
        passes = []
        for text in one.texts:
            ids = torch.tensor([[0, *encode(text, add_special_tokens=False)["input_ids"]]])
            out = model(ids, output_attentions=True, output_hidden_states=True, use_cache=False)
            passes.append((ids[0].tolist(), out))
        for side in (0, 1):
            ids, out = passes[side]
            logp = out.logits[0].log_softmax(-1)
            ce[side] += [-logp[t, ids[t + 1]] for t in range(len(ids) - 1)]
        (s_ids, s_out), (a_ids, a_out), _ = passes
        for layer in config.layers:
            s, a = s_out.attentions[layer][0], a_out.attentions[layer][0]
            if config.heads == "mean":
                s, a = s.mean(0)[None], a.mean(0)[None]
            per_head = [map_divergence(s[h], a[h], s_ids, a_ids, config) for h in range(len(s))]
            if None not in per_head:
                kl.append(torch.stack(per_head).mean())
        pooled = []
        for _, out in passes:
            hidden = out.hidden_states[-1][0]
            vector = hidden.mean(0) if config.pooling == "mean" else hidden[-1]
            pooled.append(vector / vector.norm())
        near = ((pooled[0] - pooled[1]) ** 2).sum()
        far = ((pooled[0] - pooled[2]) ** 2).sum()
        triplets.append(torch.clamp(near - far + config.margin, min=0))
    parts = {
        "ce": (torch.stack(ce[0]).mean() + torch.stack(ce[1]).mean()) / 2,
        "kl": torch.stack(kl).mean() if kl else torch.tensor(0.0),
        "triplet": torch.stack(triplets).mean(),
    }
    total = config.ce_weight * parts["ce"] + config.kl_weight * parts["kl"] + config.triplet_weight * parts["triplet"]
    return {"loss": total, **parts}


def map_divergence(s, a, s_ids, a_ids, config):
    if config.length_align == "span":
        pairs = longest_common(s_ids, a_ids)
    else:
        pairs = [(i, i) for i in range(min(len(s_ids), len(a_ids)))]
    rows = []
    for q, (qs, qa) in enumerate(pairs):
        if s_ids[: qs + 1] == a_ids[: qa + 1]:
            continue  # one and the same text so far: its attention cannot differ
        p_s, p_a = [s[qs, ks] for ks, _ in pairs[: q + 1]], [a[qa, ka] for _, ka in pairs[: q + 1]]
        other_s = [k for k in range(qs) if k not in {i for i, _ in pairs}]
        other_a = [k for k in range(qa) if k not in {j for _, j in pairs}]
        if bool(other_s) != bool(other_a):
            continue  # nothing to compare its share with
        if other_s:
            p_s.append(sum((s[qs, k] for k in other_s), torch.tensor(0.0)))
            p_a.append(sum((a[qa, k] for k in other_a), torch.tensor(0.0)))
        x, y = torch.stack(p_s), torch.stack(p_a)
        if config.renorm == "softmax":
            x, y = x.softmax(0), y.softmax(0)
        else:
            x, y = x.clamp(min=1e-9), y.clamp(min=1e-9)
            if config.renorm == "log-renorm":
                x, y = x / x.sum(), y / y.sum()
        if config.detach_anti:
            y = y.detach()
        if config.direction == "symmetric":
            rows.append((divergence(x, (x + y) / 2) + divergence(y, (x + y) / 2)) / 2)
        else:
            rows.append(divergence(y, x) if config.direction == "anti_stereo" else divergence(x, y))
    return torch.stack(rows).mean() if rows else None


def divergence(p, q):
    return (p * (p / q).log()).sum()


def longest_common(first, second):
    """Longest common subsequence by trying all of them; the sentences here have only one that is longest."""
    for size in range(min(len(first), len(second)), 0, -1):
        found = [
            (i, j)
            for i in itertools.combinations(range(len(first)), size)
            for j in itertools.combinations(range(len(second)), size)
            if all(first[x] == second[y] for x, y in zip(i, j, strict=True))
        ]
        if found:
            assert len(found) == 1
            return list(zip(*found[0], strict=True))
    return []


SHORT = (
    item("nurse", "kind", "very rude", "blue", template="the {} was {} ."),
    item("baker", "always late", "never cold", "stone", template="{} said {} ."),
)


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize(
    "config",
    [
        KLAAD(),
        KLAAD(renorm="softmax", length_align="pad_common", heads="each", layers=(0, 2)),
        KLAAD(renorm="log-renorm", direction="symmetric", pooling="last", margin=1.5),
        KLAAD(direction="stereo_anti", detach_anti=True, heads="each", length_align="pad_common"),
    ],
    ids=["defaults", "parity", "symmetric", "reverse"],
)
def test_losses_and_gradients_equal_those_by_hand(family, config):
    fast, eager = build(family), build(family, "eager")
    ours, theirs = klaad(fast, config, SHORT), by_hand(eager, config, SHORT)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert ours[name].item() == pytest.approx(theirs[name].item(), rel=2e-5, abs=1e-7), name
    assert theirs["kl"] > 1e-6
    ours["loss"].backward()
    theirs["loss"].backward()
    largest = max(weight.grad.abs().max() for weight in eager.parameters() if weight.grad is not None)
    for (name, weight), reference in zip(fast.named_parameters(), eager.parameters(), strict=True):
        if reference.grad is None:
            assert weight.grad is None or not weight.grad.any(), name
            continue
        torch.testing.assert_close(weight.grad, reference.grad, rtol=1e-3, atol=2e-5 * float(largest), msg=name)


def test_words_that_only_one_sentence_has_so_far_are_not_held_against_nothing():
    # "was kind ." against "was very kind .": the shares of "very" have no counterpart in the first.
    items = [item("nurse", "kind", "very kind", "blue", template="the {} was {} .")]
    model = build("llama", "eager")
    ours = klaad(model, KLAAD(), items)["kl"].item()
    assert ours == pytest.approx(by_hand(model, KLAAD(), items)["kl"].item(), rel=2e-5, abs=1e-9)
    assert ours < 0.1  # against a share of 1e-9, the queries after "very" alone would cost whole nats


@pytest.mark.parametrize("part", ["ce", "kl", "triplet"])
def test_a_loss_that_is_left_out_is_not_computed_and_changes_no_other(part):
    model = build("llama")
    whole, without = KLAAD(), KLAAD(**{f"{part}_weight": 0.0})
    full, rest = klaad(model, whole), klaad(model, without)
    assert set(rest) == {"loss", "ce", "kl", "triplet"} - {part}
    for name in rest.keys() - {"loss"}:
        assert rest[name].item() == pytest.approx(full[name].item(), rel=1e-5)
    factors = {"ce": 0.7, "kl": 0.15, "triplet": 0.15}
    total = sum(factors[name] * value.item() for name, value in rest.items() if name != "loss")
    assert rest["loss"].item() == pytest.approx(total, rel=1e-6)


def test_without_the_divergence_no_layer_is_tapped_and_with_it_only_those_asked_for(monkeypatch):
    model = build("llama")
    built = []
    from fairhead.heads import routes

    original = routes.attention_weights

    def count(module, *args, **kwargs):
        built.append(module.layer_idx)
        return original(module, *args, **kwargs)

    monkeypatch.setattr(routes, "attention_weights", count)
    klaad(model, KLAAD(kl_weight=0))
    assert built == []
    klaad(model, KLAAD())
    assert built == [2]
    klaad(model, KLAAD(layers=(0, -1)))
    assert built == [2, 0, 2]


def passes(model, config):
    shapes = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    examples = config.prepare(ITEMS, tokenizer(), 32).examples
    with config.session(model) as loss:
        shapes.clear()  # those of the trial whether it reads trees
        loss(examples)
    hook.remove()
    return shapes


def test_one_forward_pass_in_which_the_three_sentences_share_their_beginning():
    # "<s> the nurse was" once, then "kind and went home .", "very rude and went home ." and "blue and went home .".
    sizes = [4 + 5 + 6 + 5, 4 + 6 + 6 + 6, 5 + 4 + 8 + 5, 7 + 2 + 2 + 2]
    assert passes(build("llama"), KLAAD()) == [(len(ITEMS), max(sizes))]
    # Nobody reads the unrelated sentences.
    assert passes(build("llama"), KLAAD(triplet_weight=0)) == [(len(ITEMS), 5 + 4 + 8)]
    # A window that is narrower than a tree: a row a sentence.
    assert passes(build("gemma-2"), KLAAD()) == [(3 * len(ITEMS), 13)]


@pytest.mark.parametrize("family", ["llama", "gpt-2", "qwen", "gemma-2", "gpt-neo"])
def test_trees_and_rows_give_the_same_losses(family):
    model, config = build(family, wide=True), KLAAD(heads="each", layers=(0, 1, 2))
    examples = config.prepare(ITEMS, tokenizer(), 32).examples
    with tap(model) as heads:
        weights = heads.read("weights")
        tree, rows = (losses(model, batch_of(examples, Layout(model, kind)), config, weights) for kind in (True, False))
    for name, value in rows.items():
        assert tree[name].item() == pytest.approx(value.item(), rel=1e-5), name


def test_the_same_sentence_twice_has_no_divergence_and_no_distance():
    model = build("llama")
    same = [item("nurse", "kind", "kind", "kind"), item("poet", "cold", "cold", "cold")]
    parts = klaad(model, KLAAD(margin=0.4), same)
    assert parts["kl"].item() == pytest.approx(0, abs=1e-9)
    assert parts["triplet"].item() == pytest.approx(0.4)


def test_even_attention_has_the_divergence_of_the_spans_alone():
    """A model whose queries are 0 attends evenly: what differs is the number of tokens that the span has."""
    model = build("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    # "<s> the nurse was kind ." against "<s> the nurse was very rude .": 4 common before the span, 1 after it.
    parts = klaad(model, KLAAD(), [item("nurse", "kind", "very rude", "blue", template="the {} was {} .")])
    # The last query has 6 keys (1 of the span) in one sentence and 7 (2 of the span) in the other.
    expected = 5 * (1 / 7) * math.log((1 / 7) / (1 / 6)) + (2 / 7) * math.log((2 / 7) / (1 / 6))
    # The queries before the span say nothing: up to there both are one text.
    assert parts["kl"].item() == pytest.approx(expected, rel=1e-5)
    common = klaad(model, KLAAD(length_align="pad_common"), [item("nurse", "kind", "very rude", "blue")])
    assert common["kl"].item() == pytest.approx(0, abs=1e-9)


def test_items_without_a_row_that_can_differ_are_counted_and_take_no_part():
    with_rows = item("nurse", "kind", "very rude", "blue", template="the {} was {} .")
    without = [item(who, "kind", "rude", "blue", template="the {} was {}") for who in ("poet", "pilot")]
    model, config = build("llama"), KLAAD()
    prepared = config.prepare([with_rows, *without], tokenizer(), 32)
    assert prepared.noted == {NO_ROWS: ("poet/kind", "pilot/kind")}
    alone = klaad(model, config, [with_rows])["kl"].item()
    assert klaad(model, config, [with_rows, *without])["kl"].item() == pytest.approx(alone, rel=1e-5)
    none = klaad(model, config, without)
    assert none["kl"].item() == 0
    none["loss"].backward()  # finite, without the divergence
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())
    # Token by token, the changed token itself can be held against its counterpart.
    assert not KLAAD(length_align="pad_common").prepare(without, tokenizer(), 32).noted


def test_the_divergence_is_measured_with_both_alignments_over_the_items_that_have_rows():
    with_rows = item("nurse", "kind", "very rude", "blue", template="the {} was {} .")
    without = [item(who, "kind", "rude", "blue", template="the {} was {}") for who in ("poet", "pilot")]
    model = build("llama").double()  # of attention that differs in the fourth digit, float32 keeps three
    trainer = LanguageTrainer(model, tokenizer(), KLAAD(), LanguagePlan(batch_size=2))
    found = trainer.evaluate([with_rows, *without])
    assert set(found) == {"ce", "kl", "kl_pad_common", "triplet"}
    with torch.no_grad():
        assert found["kl"] == pytest.approx(klaad(model, KLAAD(), [with_rows])["kl"].item(), rel=1e-5)
        other = klaad(model, KLAAD(length_align="pad_common"), [with_rows, *without])["kl"].item()
    assert found["kl_pad_common"] == pytest.approx(other, rel=1e-5)
    assert "kl" not in trainer.evaluate(without)


def test_a_second_softmax_leaves_next_to_nothing():
    model = build("llama")
    plain, softmax = klaad(model, KLAAD())["kl"], klaad(model, KLAAD(renorm="softmax"))["kl"]
    assert 0 < softmax.item() < 0.05 * plain.item()


def test_the_teacher_gets_no_gradient():
    torch.manual_seed(0)
    config = KLAAD(detach_anti=True)
    batch = batch_of(config.prepare(ITEMS, tokenizer(), 32).examples, Layout(build("llama"), tree=False))
    n, width = len(ITEMS), batch.inputs["input_ids"].shape[1]
    maps = torch.randn(3 * n, 2, width, width).tril().softmax(-1).requires_grad_()
    attention_divergence(maps, batch, config).backward()
    assert maps.grad[:n].any()
    assert not maps.grad[n:].any()


def test_triplet_loss_in_closed_form():
    s, a, u = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.6, 0.8]]), torch.tensor([[-1.0, 0.0]])
    assert triplet_loss(s, a, u, margin=0.5).item() == 0  # 0.8 - 4 + 0.5 < 0
    assert triplet_loss(s, u, a, margin=0.5).item() == pytest.approx(4 - 0.8 + 0.5)
    hidden = torch.tensor([[[3.0, 4.0], [0.0, 5.0], [7.0, 7.0]]])
    torch.testing.assert_close(pool(hidden, torch.tensor([[1, 1, 0]]), "last"), torch.tensor([[0.0, 1.0]]))


def test_padding_changes_nothing():
    model = build("gemma-2")
    alone = [klaad(model, KLAAD(), [one]) for one in ITEMS]
    together = klaad(model, KLAAD())
    none = KLAAD().prepare(ITEMS, tokenizer(), 32).noted[NO_ROWS]
    for part, n in (("kl", len(alone) - len(none)), ("triplet", len(alone))):
        mean = sum(parts[part].item() for parts in alone) / n
        assert together[part].item() == pytest.approx(mean, rel=1e-4)


def test_presets_are_the_papers():
    assert KLAAD.preset("llama") == KLAAD(0.7, 0.15, 0.15, 0.3)
    assert KLAAD.preset("gpt_neo") == KLAAD.preset("gpt-neo") == KLAAD(0.5, 0.25, 0.25, 0.5)
    assert KLAAD.preset("gemma2") == KLAAD(0.9, 0.05, 0.05, 0.5)
    with pytest.raises(InputError, match=r"there is no preset 'lama'.*Did you mean 'llama'"):
        KLAAD.preset("lama")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"renorm": "sofmax"}, "renorm is 'sofmax'; expected none or softmax or log-renorm"),
        ({"kl_weight": -1.0}, "kl_weight is -1.0; expected a number of at least 0"),
        ({"ce_weight": math.nan}, "ce_weight is nan; expected a number of at least 0"),
        ({"ce_weight": 0, "kl_weight": 0, "triplet_weight": 0}, "one above"),
        ({"layers": ()}, "no layer is named"),
    ],
)
def test_settings_that_make_no_sense(options, message):
    with pytest.raises(InputError, match=message):
        KLAAD(**options)


def test_layers_that_are_not_there_are_named():
    with pytest.raises(InputError, match="layer 7 does not exist: the model has 3"):
        klaad(build("llama"), replace(KLAAD(), layers=(7,)))


def test_losses_need_a_reading_only_for_the_divergence():
    config = KLAAD(kl_weight=0)
    model = build("gpt-2")
    batch = batch_of(config.prepare(ITEMS, tokenizer(), 32).examples, Layout(model, tree=True))
    assert losses(model, batch, config, None)["loss"].isfinite()
