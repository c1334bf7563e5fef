"""What the tap costs: forward passes of the same model with and without it, interleaved, in one run.

    python benchmarks/tap.py [--device cuda] [--repeats 30] [--only BERT]

Prints the ratio to the plain sdpa forward: idle (open, nothing asked for), passing through (every layer goes through
the tapped function and nothing else happens), and reading the first token's head outputs of all layers. A tap is
opened once for many passes: it is opened, and one pass made, before the timed one; what opening costs is printed too.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel, ViTConfig, ViTModel

import fairhead
from fairhead.heads import Tap
from machine import interleaved_medians, machine


def models() -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    words = torch.randint(10, 1000, (8, 128))
    llama = LlamaConfig(hidden_size=576, num_hidden_layers=12, num_attention_heads=9, num_key_value_heads=3,
                        intermediate_size=1536, vocab_size=1000)  # fmt: skip
    bert = BertConfig(hidden_size=384, num_hidden_layers=12, num_attention_heads=12, intermediate_size=1536)
    return {
        "ViT-B/16, 224 px, batch 8": (ViTModel(ViTConfig()), {"pixel_values": torch.randn(8, 3, 224, 224)}),
        "BERT 12 × 384, 8 × 128 tokens": (BertModel(bert), {"input_ids": words}),
        "Llama 12 × 576, 8 × 128 tokens": (LlamaModel(llama), {"input_ids": words, "use_cache": False}),
    }


def untouched(q: torch.Tensor, k: torch.Tensor, site: object) -> tuple[torch.Tensor, torch.Tensor]:
    return q, k


def passing_through(model: nn.Module) -> Tap:
    heads = fairhead.tap(model).open()
    heads.transform(untouched)
    return heads


def reading(model: nn.Module) -> Tap:
    heads = fairhead.tap(model).open()
    heads.read("output", tokens=0)
    return heads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--only", default="", help="models whose name has this in it")
    arguments = parser.parse_args()
    print(machine(arguments.device))

    variants: dict[str, Callable[[nn.Module], AbstractContextManager[object]]] = {
        "plain": lambda model: nullcontext(),
        "idle": fairhead.tap,
        "passing through": passing_through,
        "first token, all layers": reading,
    }
    for name, (model, batch) in models().items():
        if arguments.only not in name:
            continue
        model = model.eval().to(arguments.device)
        batch = {k: v.to(arguments.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}

        def forward(model: nn.Module = model, batch: dict[str, Any] = batch) -> None:
            model(**batch)
            if arguments.device == "cuda":
                torch.cuda.synchronize()

        @contextmanager
        def opened(variant: str, model: nn.Module = model, forward: Callable[[], None] = forward) -> Iterator[None]:
            with variants[variant](model):
                forward()
                yield

        with torch.inference_mode():
            seconds = interleaved_medians(dict.fromkeys(variants, forward), arguments.repeats, opened)
        plain = seconds.pop("plain")
        print(f"{name}: plain {plain * 1e3:.1f} ms")
        for variant, time in seconds.items():
            print(f"  {variant:<24} {time / plain:.3f} times plain")

        def open_and_close(model: nn.Module = model) -> None:
            reading(model).close()

        opening = interleaved_medians({"open": open_and_close}, arguments.repeats)
        print(f"  opening and closing once {opening['open'] * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
