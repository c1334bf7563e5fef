"""What DAM costs: training steps, memory, and last-encoder epochs from the feature cache; ratios of one run.

    python benchmarks/dam.py [--device cuda] [--compile] [--repeats 20] [--small]

Steps of plain training (ERM), of DAM, and of a straightforward eager DAM that builds all attention weights in every
layer take turns in one process, forward, backward and AdamW included. Then one epoch of last-encoder training from
cached features is held against one that recomputes the frozen part in every step.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

from fairhead.mitigate import DAM, attach
from fairhead.mitigate.dam import most_attended, supervised_contrastive
from fairhead.train import Examples
from fairhead.train.features import frozen_features, last_encoder
from machine import interleaved_medians, machine

# DAM's own size (8 layers, 17 tokens), and a common pretrained one.
PAPER = ViTConfig(num_hidden_layers=8, num_attention_heads=8, hidden_size=768, intermediate_size=768, image_size=64,
                  hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
BASE = ViTConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
TINY = ViTConfig(num_hidden_layers=2, num_attention_heads=2, hidden_size=32, intermediate_size=32, image_size=32,
                 hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip


class EagerLayer(nn.Module):
    """A pre-LN encoder layer with attention by hand; `debias` normalises q and k and takes absolute values."""

    def __init__(self, config: ViTConfig, debias: bool) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads, self.debias = config.num_attention_heads, debias
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(
            nn.Linear(width, config.intermediate_size), nn.GELU(), nn.Linear(config.intermediate_size, width)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map x [B, T, D] to the next x, all weights [B, H, T, T], and the values [B, H, T, d]."""
        normed = self.before(x)
        q, k, v = (part(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.debias:
            q, k = (((y - y.mean(0)) / (y.std(0) + 1e-5)).abs() for y in (q, k))
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.o((weights @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.after(x)), weights, v


class EagerDAM(nn.Module):
    """DAM as one would first write it: a vision transformer that builds and keeps the weights of every layer."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, pixels, patch = config.hidden_size, config.image_size, config.patch_size
        assert isinstance(pixels, int)
        assert isinstance(patch, int)
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (pixels // patch) ** 2 + 1, width) * 0.02)
        last = config.num_hidden_layers - 1
        self.layers = nn.ModuleList([EagerLayer(config, debias=i == last) for i in range(last + 1)])
        self.norm, self.classifier = nn.LayerNorm(width), nn.Linear(width, 2)
        self.project = nn.Sequential(nn.Linear(2 * width, 512, bias=False), nn.ReLU(), nn.Linear(512, 128, bias=False))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        """The loss, alignment included."""
        tokens = self.patches(pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(tokens), -1, -1), tokens], 1) + self.positions
        kept, v = [], x
        for layer in self.layers:
            x, weights, v = layer(x)
            kept.append(weights)
        logits = self.classifier(self.norm(x)[:, 0])
        z = nn.functional.normalize(self.project(most_attended(kept[-1][:, :, 0], v, 2).flatten(1)), dim=-1)
        return nn.functional.cross_entropy(logits, labels) + supervised_contrastive(z, labels)


class Step:
    """One training step of a model on one batch."""

    def __init__(self, model: nn.Module, batch: dict[str, Tensor], device: str, compiled: bool) -> None:
        self.model = model.to(device).train()
        self.batch = {name: tensor.to(device) for name, tensor in batch.items()}
        self.device = device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device == "cuda")
        self.forward: Callable[..., Any] = torch.compile(self.model) if compiled else self.model

    def __call__(self) -> None:
        """Forward, backward, clipping, AdamW."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            output = self.forward(**self.batch)
        loss = output if isinstance(output, Tensor) else output.loss
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.device == "cuda":
            torch.cuda.synchronize()

    def peak_mib(self) -> float | None:
        """Peak memory of one step alone, beyond nothing: weights, gradients, optimizer and activations."""
        if self.device != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self()
        return (torch.cuda.max_memory_allocated() - before) / 2**20


class Size(NamedTuple):
    """A model and a batch."""

    name: str
    config: ViTConfig
    batch: int


def pictures(size: Size, rows: int) -> Tensor:
    pixels: Any = size.config.image_size
    return torch.randn(rows, 3, pixels, pixels)


def steps(size: Size, device: str, compiled: bool, repeats: int) -> None:
    torch.manual_seed(0)
    batch = {"pixel_values": pictures(size, size.batch), "labels": torch.arange(size.batch) % 2}
    peers = {
        "ERM": Step(ViTForImageClassification(size.config), batch, device, compiled),
        "DAM": Step(attach(ViTForImageClassification(size.config), DAM()), batch, device, compiled),
        "eager DAM, all weights": Step(EagerDAM(size.config), batch, device, False),
    }
    seconds = interleaved_medians(dict(peers), repeats)
    print(f"{size.name}, batch {size.batch}: ERM step {seconds['ERM'] * 1e3:.1f} ms")
    print(f"  DAM step                 {seconds['DAM'] / seconds['ERM']:.3f} times ERM")
    print(f"  eager DAM, all weights   {seconds['eager DAM, all weights'] / seconds['DAM']:.2f} times DAM")
    peaks = {name: step.peak_mib() for name, step in peers.items()}
    if peaks["ERM"] and peaks["DAM"]:
        print(f"  peak memory of a step    {peaks['DAM'] / peaks['ERM']:.3f} times ERM ({peaks['ERM']:.0f} MiB)")
    else:
        print("  peak memory of a step    not known on a CPU")


def cached_epochs(size: Size, device: str, rows: int) -> None:
    """One epoch of the last encoder layer: from the cache, and with the frozen part recomputed for every batch."""
    torch.manual_seed(0)
    examples = Examples({"pixel_values": pictures(size, rows)}, torch.arange(rows) % 2)
    whole: Any = ViTForImageClassification(size.config).eval()
    whole = whole.to(device)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        features = frozen_features(whole, examples, folder)
        extracting = time.perf_counter() - started
        rest = last_encoder(whole).to(device).train()
        # Without a cache: the whole model runs in every step, and gradients reach its last layer and head only.
        whole.requires_grad_(False)
        layers = max((m for m in whole.modules() if isinstance(m, nn.ModuleList)), key=len)
        for part in (layers[-1], whole.classifier):
            part.requires_grad_(True)

        def epoch(model: nn.Module, data: Examples) -> None:
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
            for batch in torch.randperm(rows).split(size.batch):
                taken = data.take(batch).to(device)
                loss = model(**taken.inputs, labels=taken.labels).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()

        peers: dict[str, Callable[[], object]] = {
            "cache": lambda: epoch(rest, features),
            "recomputed": lambda: epoch(whole, examples),
        }
        seconds = interleaved_medians(peers, 3)
    ratio = seconds["recomputed"] / seconds["cache"]
    print(f"{size.name}, last encoder, {rows} rows: epoch from the cache {seconds['cache'] * 1e3:.0f} ms")
    print(f"  recomputing each epoch   {ratio:.1f} times that; making the cache once took {extracting:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="compile the forward of ERM and DAM alike")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--small", action="store_true", help="tiny models: does the benchmark itself run?")
    arguments = parser.parse_args()
    print(machine(arguments.device))
    gpu = arguments.device == "cuda"
    sizes = [
        Size("ViT 8 × 768, 17 tokens", PAPER, 256 if gpu else 64),
        Size("ViT-B/16, 224 px", BASE, 64 if gpu else 4),
    ]
    if arguments.small:
        sizes = [Size("tiny ViT", TINY, 16)]
    for size in sizes:
        steps(size, arguments.device, arguments.compile, arguments.repeats)
    for size in sizes:
        cached_epochs(size, arguments.device, size.batch * (16 if gpu else 2))


if __name__ == "__main__":
    main()
