"""Tiny random models of every family that the tap must serve, each with a batch that exercises its masks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn


@dataclass(frozen=True)
class Family:
    """A family in the conformance table.

    Attributes:
        build: makes the model; takes the attention implementation.
        inputs: makes the batch.
        output: the model's output to compare.
        weights: whether its attention weights can be read.
        q_and_k: whether q and k can be read and transformed.
        implementations: those that the family can be loaded with, the fast one first.
    """

    build: Callable[[str], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    output: str = "last_hidden_state"
    weights: bool = True
    q_and_k: bool = True
    implementations: tuple[str, ...] = ("sdpa", "eager")


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
TEXT = {
    **SMALL,
    "vocab_size": 60,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}


def image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))}


def text(side: str = "right") -> dict[str, Tensor]:
    """Three sequences of 9 tokens, two of them padded."""
    ids = torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, pads in ((1, 3), (2, 5)):
        mask[row, -pads:] = 0
    if side == "left":
        mask = mask.flip(1)
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def seq2seq() -> dict[str, Tensor]:
    return {**text(), "decoder_input_ids": torch.tensor([[0, 5, 6], [0, 7, 8], [0, 9, 10]])}


def clip() -> dict[str, Tensor]:
    return {**text(), **image()}


def patches() -> dict[str, Tensor]:
    """Images of SigLIP 2 come as rows of patches; the second one has a row of padding."""
    pixels = torch.randn(3, 4, 48, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]])
    return {
        "pixel_values": pixels,
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor([[2, 2], [1, 2], [2, 2]]),
    }


def tiles() -> dict[str, Tensor]:
    """Images of Mllama: [batch, images, tiles, channels, height, width]."""
    return {
        "pixel_values": image()["pixel_values"][:, None, None],
        "aspect_ratio_ids": torch.ones(3, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(3, 1, 1, dtype=torch.long),
    }


def of(model_class: str, config_class: str, **settings: Any) -> Callable[[str], nn.Module]:
    def build(implementation: str) -> nn.Module:
        torch.manual_seed(0)
        config = getattr(hf, config_class)(**settings)
        config._attn_implementation = implementation
        model = getattr(hf, model_class)(config).eval()
        # Larger than the usual initialisation, so that heads differ and attention is far from uniform.
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() == 2 and "embed" not in name:
                    weight.mul_(4.0)
                elif "bias" in name:
                    weight.normal_(std=0.1)
        return model

    return build


VIT = {**SMALL, "image_size": 8, "patch_size": 4}
TOWERS = {
    "vision_config": VIT,
    "text_config": {**TEXT, "eos_token_id": 59},
    "projection_dim": 16,
}
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 60,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = {**GROUPED, "sliding_window": 4}

FAMILIES: dict[str, Family] = {
    "ViT": Family(of("ViTModel", "ViTConfig", **VIT), image),
    "DeiT": Family(of("DeiTModel", "DeiTConfig", **VIT), image),
    "DINOv2": Family(of("Dinov2Model", "Dinov2Config", **VIT), image),
    "BERT": Family(of("BertModel", "BertConfig", **TEXT), text),
    "RoBERTa": Family(of("RobertaModel", "RobertaConfig", **TEXT), text),
    "ELECTRA": Family(of("ElectraModel", "ElectraConfig", **TEXT, embedding_size=32), text),
    "DistilBERT": Family(
        of("DistilBertModel", "DistilBertConfig", dim=32, n_layers=2, n_heads=4, hidden_dim=40, vocab_size=60), text
    ),
    "ModernBERT": Family(
        of(
            "ModernBertModel",
            "ModernBertConfig",
            **TEXT,
            local_attention=4,
            global_attn_every_n_layers=2,
            reference_compile=False,
            cls_token_id=1,
            sep_token_id=2,
        ),
        text,
    ),
    "GPT-2": Family(of("GPT2Model", "GPT2Config", **GPT2), text),
    "GPT-NeoX": Family(of("GPTNeoXModel", "GPTNeoXConfig", **TEXT), text),
    "Llama": Family(of("LlamaModel", "LlamaConfig", **GROUPED), text),
    "Mistral": Family(of("MistralModel", "MistralConfig", **SLIDING), text),
    "Gemma-2": Family(
        of("Gemma2Model", "Gemma2Config", **SLIDING, attn_logit_softcapping=5.0), text, implementations=("eager",)
    ),
    "Gemma-3": Family(of("Gemma3TextModel", "Gemma3TextConfig", **SLIDING), text),
    "Qwen3": Family(of("Qwen3Model", "Qwen3Config", **GROUPED), text),
    "Phi-3": Family(of("Phi3Model", "Phi3Config", **GROUPED), text),
    "OPT": Family(of("OPTModel", "OPTConfig", **TEXT, ffn_dim=40, word_embed_proj_dim=32), text),
    "T5": Family(
        of("T5Model", "T5Config", d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4, vocab_size=60), seq2seq
    ),
    "BART": Family(
        of(
            "BartModel",
            "BartConfig",
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=40,
            decoder_ffn_dim=40,
            vocab_size=60,
            max_position_embeddings=64,
        ),
        seq2seq,
    ),
    "CLIP vision": Family(of("CLIPVisionModel", "CLIPVisionConfig", **VIT), image),
    "CLIP": Family(of("CLIPModel", "CLIPConfig", **TOWERS), clip, output="logits_per_image"),
    "SigLIP": Family(of("SiglipModel", "SiglipConfig", **TOWERS), clip, output="logits_per_image"),
    "GPT-Neo": Family(
        of(
            "GPTNeoModel",
            "GPTNeoConfig",
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=4,
            vocab_size=60,
            max_position_embeddings=64,
            bos_token_id=1,
            eos_token_id=2,
        ),
        text,
        implementations=("eager",),
    ),
    "GPT-J": Family(
        of("GPTJModel", "GPTJConfig", **GPT2, rotary_dim=4),
        text,
        implementations=("eager",),
    ),
    "DeBERTa-v2": Family(
        of(
            "DebertaV2Model",
            "DebertaV2Config",
            **TEXT,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
            position_buckets=4,
            share_att_key=True,
        ),
        text,
        q_and_k=False,
        implementations=("eager",),
    ),
    "MPNet": Family(
        of("MPNetModel", "MPNetConfig", **TEXT), text, weights=False, q_and_k=False, implementations=("eager",)
    ),
    "BLOOM": Family(
        of("BloomModel", "BloomConfig", hidden_size=32, n_layer=2, n_head=4, vocab_size=60),
        text,
        weights=False,
        q_and_k=False,
        implementations=("eager",),
    ),
}

# Families that the tap serves too, where other parts of the package stop short: gated heads, unusual blocks.
TAP_FAMILIES: dict[str, Family] = FAMILIES | {
    "DINOv3": Family(of("DINOv3ViTModel", "DINOv3ViTConfig", **VIT, num_register_tokens=2), image),
    "SigLIP-2 vision": Family(
        of("Siglip2VisionModel", "Siglip2VisionConfig", **SMALL, num_patches=4, patch_size=4), patches
    ),
    "Mllama vision": Family(
        of(
            "MllamaVisionModel",
            "MllamaVisionConfig",
            hidden_size=32,
            num_hidden_layers=1,
            num_global_layers=1,
            attention_heads=4,
            intermediate_size=40,
            image_size=8,
            patch_size=4,
            vision_output_dim=64,
            max_num_tiles=1,
            supported_aspect_ratios=[[1, 1]],
            intermediate_layers_indices=[0],
        ),
        tiles,
    ),
    "Llama-4 vision": Family(
        of(
            "Llama4VisionModel",
            "Llama4VisionConfig",
            **{**SMALL, "intermediate_size": 128},
            image_size=8,
            patch_size=4,
            vision_output_dim=32,
            projector_input_dim=32,
            projector_output_dim=32,
        ),
        image,
    ),
    "Qwen3-Next": Family(  # heads pass a gate on their way to W_O
        of(
            "Qwen3NextModel",
            "Qwen3NextConfig",
            **GROUPED,
            layer_types=["full_attention", "full_attention"],
            num_experts=0,
            linear_num_value_heads=2,
            linear_num_key_heads=2,
        ),
        text,
    ),
    "CodeGen": Family(
        of("CodeGenModel", "CodeGenConfig", **GPT2, rotary_dim=4),
        text,
        implementations=("eager",),
    ),
    "Falcon": Family(
        of(
            "FalconModel",
            "FalconConfig",
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=60,
            bos_token_id=1,
            eos_token_id=2,
        ),
        text,
        weights=False,
        q_and_k=False,
    ),
    "DeBERTa": Family(
        of("DebertaModel", "DebertaConfig", **TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"]),
        text,
        q_and_k=False,
        implementations=("eager",),
    ),
}


def run(family: Family, model: nn.Module) -> Tensor:
    """The model's output on the family's batch."""
    output: Tensor = getattr(model(**family.inputs()), family.output)
    return output
