"""Language models made by hand: one head that carries a stereotype, or none, and the pairs that show it."""

import numpy as np
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from fairhead.data.sentences import CrowsPair, StereoSetItem, Triplet
from fairhead.language.scorer import Scorer
from fairhead.locate.pair_rows import pairs_of

GROUPS = ("women", "men")
TRAITS = ("kind", "strong")  # said of women, said of men
FILLERS = tuple(f"word{i}" for i in range(20))
WORDS = ("<s>", "the", "are", *GROUPS, *TRAITS, *FILLERS)
LAYERS, HEADS, WIDTH = 3, 4, 32
PLANTED = (1, 2)
GROUP, TRAIT = 0, 1  # channels of the stream: which group was named, which trait is to come


def tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="<s>")


def llama(seed=0, noise=0.1):
    """A small Llama whose weights are noise; the embedding and the unembedding are apart."""
    torch.manual_seed(seed)
    config = hf.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = hf.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=1.0 if "embed" in name else noise)
    return model.requires_grad_(False)


def planted_llama(at=PLANTED, strength=6.0, seed=0):
    """One head sees which group was named and makes its trait likelier; nothing else knows the two apart."""
    model = llama(seed)
    embedding, unembedding = model.model.embed_tokens.weight, model.lm_head.weight
    first, second = (WORDS.index(group) for group in GROUPS)
    embedding[second] = embedding[first]
    unembedding[second] = unembedding[first]
    embedding[:, [GROUP, TRAIT]] = 0
    embedding[first, GROUP], embedding[second, GROUP] = 4.0, -4.0
    unembedding[:, [GROUP, TRAIT]] = 0
    for trait, sign in zip(TRAITS, (1.0, -1.0), strict=True):
        unembedding[WORDS.index(trait), TRAIT] = sign
    for layer in model.model.layers:
        # No other head, and no MLP, reads or writes the two channels.
        layer.self_attn.v_proj.weight[:, [GROUP, TRAIT]] = 0
        layer.self_attn.q_proj.weight[:, [GROUP, TRAIT]] = 0
        layer.self_attn.k_proj.weight[:, [GROUP, TRAIT]] = 0
        layer.self_attn.o_proj.weight[[GROUP, TRAIT]] = 0
        layer.mlp.gate_proj.weight[:, [GROUP, TRAIT]] = 0
        layer.mlp.up_proj.weight[:, [GROUP, TRAIT]] = 0
        layer.mlp.down_proj.weight[[GROUP, TRAIT]] = 0
    attention = model.model.layers[at[0]].self_attn
    size = WIDTH // HEADS
    rows = slice(at[1] * size, (at[1] + 1) * size)
    attention.q_proj.weight[rows] = 0  # look at all tokens evenly
    attention.v_proj.weight[rows] = 0
    attention.v_proj.weight[rows.start, GROUP] = 1.0
    attention.o_proj.weight[:, rows] = 0
    attention.o_proj.weight[TRAIT, rows.start] = strength
    return model


def pairs(n=120, seed=0, swapped=False):
    """Sentences about one group or the other, with a trait; fillers make no two alike.

    With `swapped`, which sentence of a pair is called the stereotype is drawn at random.
    """
    rng = np.random.default_rng(seed)
    found = []
    for i in range(n):
        which = i % 2
        filler = [FILLERS[k] for k in rng.choice(len(FILLERS), 3, replace=False)]
        more, less = (
            f"{filler[0]} the {GROUPS[group]} {filler[1]} are {TRAITS[which]} {filler[2]}"
            for group in (which, 1 - which)
        )
        if swapped and rng.random() < 0.5:
            more, less = less, more
        found.append(CrowsPair(str(i), more, less, ("stereo", "antistereo")[which], ("gender", "age")[i % 3 % 2], ()))
    return found


def scorer(model):
    return Scorer(model, tokenizer())


def text_pairs(**options):
    return pairs_of(pairs(**options))


def stereoset_items(n=24, terms=8):
    """StereoSet items of both kinds about some terms."""
    found = []
    for i in range(n):
        group, other = GROUPS[i % 2], GROUPS[1 - i % 2]
        trait, against = TRAITS[i % 2], TRAITS[1 - i % 2]
        sentences = Triplet(
            f"the {group} are {trait}", f"the {group} are {against}", f"the {other} word{i % 20} word3 are the"
        )
        kind = ("intrasentence", "intersentence")[i % 3 == 0]
        found.append(StereoSetItem(str(i), kind, f"term{i % terms}", ("gender", "race")[i % 2], "word1 are", sentences))
    return found
