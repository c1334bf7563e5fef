"""A small classifier of each family that DAM serves, and a batch for it."""

import torch
import transformers as hf
from families import TEXT, VIT

WORDS = {**TEXT, "num_labels": 3}
FAMILIES = {
    "ViT": ("ViTForImageClassification", "ViTConfig", {**VIT, "num_labels": 3}),
    "DINOv2": ("Dinov2ForImageClassification", "Dinov2Config", {**VIT, "num_labels": 3}),
    "CLIP vision": ("CLIPForImageClassification", "CLIPConfig", {"vision_config": VIT, "num_labels": 3}),
    "BERT": ("BertForSequenceClassification", "BertConfig", WORDS),
    "RoBERTa": ("RobertaForSequenceClassification", "RobertaConfig", WORDS),
    "DistilBERT": (
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 40, "vocab_size": 60, "num_labels": 3},
    ),
    "ModernBERT": (
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        {**WORDS, "local_attention": 4, "reference_compile": False, "cls_token_id": 1, "sep_token_id": 2},
    ),
}
TEXT_BASES = {"bert", "roberta", "distilbert"}
IMAGES = ("ViT", "DINOv2", "CLIP vision")


def build(family):
    torch.manual_seed(0)
    model, config, settings = FAMILIES[family]
    return getattr(hf, model)(getattr(hf, config)(**settings))


def batch(family, rows=8, tokens=9, seed=1):
    chance = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % 3
    if family in IMAGES:
        return {"pixel_values": torch.randn(rows, 3, 8, 8, generator=chance), "labels": labels}
    ids = torch.randint(3, 60, (rows, tokens), generator=chance)
    mask = (torch.arange(tokens) < torch.randint(4, tokens + 1, (rows, 1), generator=chance)).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def without_dropout(model):
    for module in model.modules():
        for name in ("p", "attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model
