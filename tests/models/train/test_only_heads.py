"""Training in some heads only: which weights move, and that nothing else does."""

import json

import pytest
import torch
from language_models import ITEMS, build, tokenizer

from fairhead.data.sentences import TripletSplit
from fairhead.errors import InputError, UnsupportedModel
from fairhead.mitigate.balance_pairs import BalancePairs
from fairhead.mitigate.language_trainer import LanguageTrainer
from fairhead.train import LanguagePlan
from fairhead.train.tuning import random_heads, read_heads

SIZE = 8  # of a head, four of which are 32 wide
HEADS = ((0, 3), (2, 0))


def moved(family, **plan):
    """Parameter -> where it has changed by training."""
    before = {name: weight.detach().clone() for name, weight in build(family).named_parameters()}
    chosen = LanguagePlan(2, 4, 1e-2, only_heads="L0H3,L2H0", **plan)
    trainer = LanguageTrainer(build(family), tokenizer(), BalancePairs(), chosen)
    trainer.train(TripletSplit(ITEMS, ()))
    after = dict(trainer.model.named_parameters())
    assert all(weight.requires_grad for weight in after.values())
    changed = {name: (after[name].detach() != weight) for name, weight in before.items()}
    return {name: where for name, where in changed.items() if where.any()}, trainer.record


def rows(heads):
    return [head * SIZE + i for head in heads for i in range(SIZE)]


def test_rows_of_q_k_v_and_columns_of_o_move_and_nothing_else():
    changed, record = moved("llama")
    assert record.results["heads"] == [[0, 3], [2, 0]]
    places = {}
    for layer, head in HEADS:
        # Two query heads share a key and value head here.
        places |= {f"model.layers.{layer}.self_attn.q_proj.weight": rows([head])}
        places |= {f"model.layers.{layer}.self_attn.{p}_proj.weight": rows([head // 2]) for p in "kv"}
        places |= {f"model.layers.{layer}.self_attn.o_proj.weight": rows([head])}
    assert set(changed) == set(places)
    for name, where in changed.items():
        of = where.any(0) if "o_proj" in name else where.any(1)
        assert of.nonzero()[:, 0].tolist() == places[name], name


def test_heads_of_a_fused_projection():
    changed, _ = moved("gpt-2")
    layer, head = HEADS[0]
    weight = changed[f"transformer.h.{layer}.attn.c_attn.weight"]
    expected = [place + 32 * part for part in range(3) for place in rows([head])]
    assert set(weight.any(0).nonzero()[:, 0].tolist()) == set(expected)
    assert changed[f"transformer.h.{layer}.attn.c_proj.weight"].any(1).nonzero()[:, 0].tolist() == rows([head])
    assert not any("wte" in name or "mlp" in name or "ln" in name for name in changed)


def test_as_many_random_heads_of_the_same_layers_are_the_control():
    _, record = moved("llama", random_heads=True, seed=1)
    found = [tuple(head) for head in record.results["heads"]]
    assert sorted(layer for layer, _ in found) == [0, 2]
    assert not set(found) & set(HEADS)
    everything = [(0, head) for head in range(4)]
    assert random_heads(everything, [4], seed=0) == tuple(everything)


def test_what_cannot_be_trained_is_refused(tmp_path):
    for wrong, message in (
        ({"only_heads": "L9H0"}, "no head L9H0: the model has 3 layers"),
        ({"only_heads": "first"}, "does not name heads"),
        ({"only_heads": "L0H0", "lora": 4}, "leave lora and weight_decay out"),
        ({"only_heads": str(tmp_path / "no.json")}, "is not a head map"),
    ):
        with pytest.raises(InputError, match=message):
            LanguageTrainer(build("llama"), tokenizer(), BalancePairs(), LanguagePlan(1, 4, 1e-3, **wrong)).train(
                TripletSplit(ITEMS, ())
            )
    file = tmp_path / "headmap.json"
    file.write_text(json.dumps({"selected": [[1, 2], [0, 1]]}))
    assert read_heads(str(file)) == ((1, 2), (0, 1))
    model = build("llama")
    model.model.layers[0].self_attn.q_proj = torch.nn.Sequential(model.model.layers[0].self_attn.q_proj)
    with pytest.raises(UnsupportedModel, match="no linear q_proj"):
        LanguageTrainer(model, tokenizer(), BalancePairs(), LanguagePlan(1, 4, 1e-3, only_heads="L0H0")).train(
            TripletSplit(ITEMS, ())
        )
