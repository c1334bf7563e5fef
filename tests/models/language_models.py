"""Tiny random causal language models of the families that KLAAD serves, and triplets that they can read."""

import copy
import json

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

from fairhead.data.sentences import GOLD_LABELS, StereoSetItem, Triplet

_WORDS = (
    "<s> the old nurse baker pilot poet was very kind and rude to blue so people said that he she went home late . "
    "never always often careful with money cold stone"
)
WORDS = _WORDS.split()
VOCABULARY = len(WORDS)
SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
ROPE = {
    **SMALL,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}
NEO = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_layers": 3,
    "num_heads": 4,
    "attention_types": [[["global", "local", "global"], 1]],
    "max_position_embeddings": 32,
    "window_size": 4,
}
ENDS = {"bos_token_id": 0, "eos_token_id": 0}

FAMILIES = {
    "llama": hf.LlamaConfig(**ROPE),
    "gpt-neo": hf.GPTNeoConfig(**NEO, **ENDS),
    "gemma-2": hf.Gemma2Config(**ROPE, sliding_window=4, query_pre_attn_scalar=8, attn_logit_softcapping=5.0),
    "gpt-2": hf.GPT2Config(**GPT2, **ENDS),
    "qwen": hf.Qwen3Config(**ROPE),
}


WIDE = {
    "gpt-neo": hf.GPTNeoConfig(**{**NEO, "window_size": 32}, **ENDS),
    "gemma-2": hf.Gemma2Config(**ROPE, sliding_window=32, query_pre_attn_scalar=8, attn_logit_softcapping=5.0),
}


def build(family, implementation=None, scale=4.0, wide=False):
    """Weights larger than those of a fresh model, so that its attention is not even; `wide`: windows play no part."""
    torch.manual_seed(0)
    # A copy: a model holds on to its configuration, and some methods change it.
    config = copy.deepcopy(WIDE.get(family, FAMILIES[family]) if wide else FAMILIES[family])
    # Gemma-2 and GPT-Neo have eager attention only.
    chosen = {} if family in ("gemma-2", "gpt-neo") else {"attn_implementation": implementation or "sdpa"}
    model = hf.AutoModelForCausalLM.from_config(config, **chosen).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(scale)
    return model


def tokenizer():
    return word_tokenizer(WORDS, pre_tokenizers.WhitespaceSplit(), eos_token="<s>")


def word_tokenizer(known, split=None, **special):
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, "<s>"))
    words.pre_tokenizer = split or pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", **special)


def saved(folder, family="llama"):
    """A model and its tokenizer in a folder, as a user has them."""
    build(family).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def item(target, stereotype, anti, unrelated, template="the {} was {} and went home ."):
    texts = Triplet(*(template.format(target, filled) for filled in (stereotype, anti, unrelated)))
    return StereoSetItem(f"{target}/{stereotype}", "intrasentence", target, "profession", template, texts)


ITEMS = (
    item("nurse", "kind", "very rude", "blue"),
    item("baker", "always late", "never late", "cold stone"),
    item("pilot", "careful", "careful with money to people", "so"),
    item("poet", "cold", "kind", "stone", template="people said that the {} was {} ."),
)


def write_stereoset(file):
    """The items as StereoSet is published."""
    entries = [
        {
            "id": one.id,
            "target": one.target,
            "bias_type": "profession",
            "context": one.context,
            "sentences": [
                {"sentence": text, "gold_label": label} for text, label in zip(one.texts, GOLD_LABELS, strict=True)
            ],
        }
        for one in ITEMS
    ]
    file.write_text(json.dumps({"data": {"intrasentence": entries}}))
