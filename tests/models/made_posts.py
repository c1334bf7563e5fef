"""A text classifier with one head that sees whether a post is about women, and posts in HateXplain's form."""

import json

import numpy as np
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

FILLERS = tuple(f"word{i}" for i in range(30))
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "women", *FILLERS)
LAYERS, HEADS, WIDTH = 2, 8, 32
PLANTED = (1, 5)
GROUP, CLASS = (0, 1), (2, 3)  # pairs of channels, opposite in sign, so that LayerNorm's mean stays put


def tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def bert(seed=0):
    torch.manual_seed(seed)
    config = hf.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=32,
        max_position_embeddings=32,
        id2label={0: "normal", 1: "toxic"},
        label2id={"normal": 0, "toxic": 1},
    )
    model = hf.BertForSequenceClassification(config).eval()
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=0.5 if "embeddings" in name else 0.1)
    return model.requires_grad_(False)


def planted_bert(at=PLANTED, strength=12.0, seed=0):
    """One head looks at all tokens evenly, finds "women", and says "toxic"; the classifier hears it and some noise."""
    model = bert(seed)
    base = model.bert
    taken = [*GROUP, *CLASS]
    for table in (base.embeddings.word_embeddings, base.embeddings.position_embeddings,
                  base.embeddings.token_type_embeddings):  # fmt: skip
        table.weight[:, taken] = 0
    base.embeddings.word_embeddings.weight[WORDS.index("women"), GROUP[0]] = 12.0
    base.embeddings.word_embeddings.weight[WORDS.index("women"), GROUP[1]] = -12.0
    for layer in base.encoder.layer:
        attention = layer.attention
        for linear in (attention.self.query, attention.self.key, attention.self.value, layer.intermediate.dense):
            linear.weight[:, taken] = 0
        for linear in (attention.output.dense, layer.output.dense):
            linear.weight[taken] = 0
    attention = base.encoder.layer[at[0]].attention
    size = WIDTH // HEADS
    rows = slice(at[1] * size, (at[1] + 1) * size)
    attention.self.query.weight[rows] = 0
    attention.self.query.bias[rows] = 0
    attention.self.value.weight[rows] = 0
    attention.self.value.weight[rows.start, GROUP[0]] = 1.0
    attention.output.dense.weight[:, rows] = 0
    attention.output.dense.weight[CLASS[0], rows.start] = strength
    attention.output.dense.weight[CLASS[1], rows.start] = -strength
    model.bert.pooler.dense.weight[0] = 0
    model.bert.pooler.dense.weight[0, CLASS[0]] = 0.5
    model.bert.pooler.dense.weight[0, CLASS[1]] = -0.5
    model.bert.pooler.dense.bias[0] = -1.0
    model.classifier.weight[:, 0] = torch.tensor([-3.0, 3.0])
    model.classifier.bias.copy_(torch.tensor([1.0, -1.0]))
    return model


def write_posts(folder, n=400, seed=0):
    """Posts of random words, half of them about women; the label has nothing to do with that."""
    rng = np.random.default_rng(seed)
    posts, parts = {}, {"train": [], "val": [], "test": []}
    for i in range(n):
        about = i % 2 == 0
        tokens = [FILLERS[k] for k in rng.choice(len(FILLERS), rng.integers(4, 8))]
        if about:
            tokens[int(rng.integers(len(tokens)))] = "women"
        label = "offensive" if (i // 2) % 2 else "normal"
        annotator = {"label": label, "target": ["Women"] if about else ["None"]}
        posts[f"{i}_gab"] = {"annotators": [annotator] * 3, "rationales": [], "post_tokens": tokens}
        parts["train" if i < 40 else "val" if i < 220 else "test"].append(f"{i}_gab")
    (folder / "dataset.json").write_text(json.dumps(posts))
    (folder / "post_id_divisions.json").write_text(json.dumps(parts))
    return folder
