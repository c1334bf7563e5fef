"""Attention entropies against eager attention and in closed form."""

import numpy as np
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

from fairhead.errors import InputError
from fairhead.language.benchmarks.attention_entropy import BENCHMARK, by_head, layers, table
from fairhead.language.benchmarks.perplexity import Document
from fairhead.language.scorer import Scorer
from fairhead.stats.bootstrap import Resampling

WORDS = ["<s>", "he", "she", "was", "kind", "cruel", "cried", "the", "nurse", "doctor"]
TEXTS = ["he was kind", "the nurse cried the doctor was cruel she cried", "she cried", "he " * 40]
DOCUMENTS = [Document(f"d{i}", text) for i, text in enumerate(TEXTS)]


def scorer(kind):
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, "<s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    if kind == "gpt2":
        config = hf.GPT2Config(
            vocab_size=len(WORDS), n_embd=16, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0
        )
        model = hf.GPT2LMHeadModel(config)
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = hf.LlamaConfig(
            **sizes, num_key_value_heads=2, vocab_size=len(WORDS), max_position_embeddings=32, bos_token_id=0
        )
        model = hf.LlamaForCausalLM(config)
    for weight in model.parameters():  # far from uniform
        torch.nn.init.normal_(weight, std=0.7)
    return Scorer(model.eval(), hf.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>"))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_entropies_equal_those_of_eager_attention(kind):
    of = scorer(kind)
    found = table(of, DOCUMENTS, window=20)
    assert found.column("rows").tolist() == [3, 9, 2, 19]  # the last is cut at the window
    model = of.model
    model.set_attn_implementation("eager")
    for row, document in enumerate(DOCUMENTS):
        ids = torch.tensor([[0, *of.tokenizer(document.text, add_special_tokens=False)["input_ids"][:19]]])
        with torch.no_grad():
            maps = model(ids, output_attentions=True).attentions
        for layer, weights in enumerate(maps):
            for head in range(4):
                map_ = weights[0, head].double()
                rows = [
                    float(-(map_[q, : q + 1] * map_[q, : q + 1].log()).sum() / np.log(q + 1))
                    for q in range(1, ids.shape[1])
                ]
                assert found.column(f"L{layer}H{head}")[row] == pytest.approx(np.mean(rows), abs=1e-5)


def test_a_model_without_queries_looks_everywhere_alike():
    of = scorer("llama")
    with torch.no_grad():
        of.model.model.layers[1].self_attn.q_proj.weight.zero_()
    found = table(of, DOCUMENTS)
    assert np.allclose(by_head(found)[1], 1.0, atol=1e-6)
    assert max(by_head(found)[0]) < 0.98
    result = BENCHMARK.result(found, Resampling(n_boot=100))
    assert result["attention_entropy_layer_1"].undefined == "4 clusters; at least 10 are needed for an interval"
    assert result["attention_entropy_layer_1"].detail["value"] == pytest.approx(1.0, abs=1e-6)
    every = np.mean([h for layer in by_head(found) for h in layer])
    assert result["attention_entropy"].detail["value"] == pytest.approx(every)
    assert [len(names) for names in layers(found)] == [4, 4]


def test_texts_without_a_second_token_are_named():
    of = scorer("gpt2")
    found = table(of, [*DOCUMENTS, Document("one", "he")])
    assert found.left_out == {"fewer than two tokens": ("one",)}
    with pytest.raises(InputError, match="no text of at least two tokens"):
        table(of, [Document("one", "he")])
    with pytest.raises(InputError, match="a window of 2 tokens"):
        table(of, DOCUMENTS, window=2)
