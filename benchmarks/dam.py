"""What DAM costs: training steps, memory, and last-encoder epochs from the feature cache; ratios of one run.

    python benchmarks/dam.py [--device cuda] [--repeats 20] [--small]

Steps of plain training (ERM), of DAM, and of a straightforward eager DAM that builds all attention weights in every
layer take turns in one process: forward, backward, clipping and AdamW. ERM and DAM run as
`fairhead.train.fitting.fit` runs them, recorded and replayed on a GPU, and once more with compiled layers
(`TrainingPlan(compile=True)`); the eager DAM runs as it is written, and once more replayed like the others. Then an
epoch of last-encoder training from cached features is held against one that runs the whole model in every step.

On a CPU seconds are processor time of this process: wall time would tell what else the machine has to do.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

from fairhead.mitigate import DAM, attach
from fairhead.mitigate.dam import most_attended, supervised_contrastive
from fairhead.train.features import frozen_features
from fairhead.train.last_encoder import last_encoder
from fairhead.train.recorded import CompiledLayers, Recorded, recorder_for
from fairhead.train.step import Batch, Batches, ClassifierLoss, Examples, Step, optimizer_of
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

    def forward(self, pixel_values: Tensor, labels: Tensor) -> SimpleNamespace:
        """The loss, alignment included."""
        tokens = self.patches(pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(tokens), -1, -1), tokens], 1) + self.positions
        kept, v = [], x
        for layer in self.layers:
            x, weights, v = layer(x)
            kept.append(weights)
        logits = self.classifier(self.norm(x)[:, 0])
        z = nn.functional.normalize(self.project(most_attended(kept[-1][:, :, 0], v, 2).flatten(1)), dim=-1)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels) + supervised_contrastive(z, labels))


class Peer:
    """A training step of a model on one batch, as the loop makes it; `as_it_is` keeps it from being replayed."""

    def __init__(
        self, model: nn.Module, batch: Batch, device: str, *, as_it_is: bool = False, compiled: bool = False
    ) -> None:
        self.model = model.to(device).train()
        self.layers = CompiledLayers(self.model, torch.device(device)) if compiled else None
        self.batch = batch
        self.precision = "bf16" if device == "cuda" else "no"
        recorder = None if as_it_is else recorder_for(torch.device(device))
        self.step = Recorded(self._plain(), recorder, self.model)

    def _plain(self) -> Step[Batch]:
        self.optimizer = optimizer_of(self.model, 1e-4, 0.05)
        loss = ClassifierLoss(self.model, layers=self.layers)
        return Step(loss, self.optimizer, max_grad_norm=1.0, precision=self.precision)

    def __call__(self) -> None:
        """One step, to its end."""
        self.step(self.batch)
        if self.batch.labels.is_cuda:
            torch.cuda.synchronize()

    def peak_mib(self) -> float | None:
        """Peak memory of one step beyond the weights and AdamW's moments: activations and gradients."""
        if not self.batch.labels.is_cuda:
            return None
        step = self._plain()
        step(self.batch)
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(self.batch)
        return (torch.cuda.max_memory_allocated() - before) / 2**20


class Size(NamedTuple):
    """A model and a batch."""

    name: str
    config: ViTConfig
    batch: int


def pictures(size: Size, rows: int) -> Tensor:
    pixels: Any = size.config.image_size
    return torch.randn(rows, 3, pixels, pixels)


def medians(peers: Mapping[str, Callable[[], object]], device: str, repeats: int) -> dict[str, float]:
    for _ in range(5 if device == "cuda" else 0):  # until everything that will be recorded is
        for peer in peers.values():
            peer()
    clock = time.perf_counter if device == "cuda" else time.process_time
    return interleaved_medians(dict(peers), repeats, clock=clock)


def steps(size: Size, device: str, repeats: int) -> None:
    torch.manual_seed(0)
    labels = torch.arange(size.batch, device=device) % 2
    batch = Batch({"pixel_values": pictures(size, size.batch).to(device)}, labels, torch.arange(size.batch))
    with torch.device(device):  # weights are drawn there, which is quicker
        peers = {
            "ERM": Peer(ViTForImageClassification(size.config), batch, device),
            "DAM": Peer(attach(ViTForImageClassification(size.config), DAM()), batch, device),
            "eager": Peer(EagerDAM(size.config), batch, device, as_it_is=True),
        }
        if device == "cuda":
            peers["ERM, step by step"] = Peer(ViTForImageClassification(size.config), batch, device, as_it_is=True)
            peers["eager, replayed"] = Peer(EagerDAM(size.config), batch, device)
            peers["ERM, compiled"] = Peer(ViTForImageClassification(size.config), batch, device, compiled=True)
            dam = attach(ViTForImageClassification(size.config), DAM())
            peers["DAM, compiled"] = Peer(dam, batch, device, compiled=True)
    seconds = medians(peers, device, repeats)
    print(f"{size.name}, batch {size.batch}: ERM step {seconds['ERM'] * 1e3:.2f} ms")
    print(f"  DAM step                 {seconds['DAM'] / seconds['ERM']:.3f} times ERM")
    print(f"  eager DAM, all weights   {seconds['eager'] / seconds['DAM']:.2f} times DAM")
    if device == "cuda":
        print(f"    replayed as well       {seconds['eager, replayed'] / seconds['DAM']:.2f} times DAM")
        print(f"  ERM step by step         {seconds['ERM, step by step'] / seconds['ERM']:.2f} times ERM replayed")
        erm, dam_step = seconds["ERM, compiled"], seconds["DAM, compiled"]
        print(
            f"  with compiled layers     ERM {erm / seconds['ERM']:.2f} times ERM, DAM {dam_step / erm:.3f} times that"
        )
        print(f"    eager DAM              {seconds['eager'] / dam_step:.2f} times compiled DAM")
    peaks = {name: peers[name].peak_mib() for name in ("ERM", "DAM", "eager")}
    if peaks["ERM"] and peaks["DAM"] and peaks["eager"]:
        print(
            f"  peak memory of a step    {peaks['DAM'] / peaks['ERM']:.3f} times ERM ({peaks['ERM']:.0f} MiB); ", end=""
        )
        print(f"eager DAM {peaks['eager'] / peaks['ERM']:.2f} times ERM")
    else:
        print("  peak memory of a step    not known on a CPU")


def cached_epochs(size: Size, device: str, rows: int) -> None:
    """Last-encoder training: from the cache, and with the whole model run in every step."""
    torch.manual_seed(0)
    examples = Examples({"pixel_values": pictures(size, rows)}, torch.arange(rows) % 2)
    with torch.device(device):
        whole = ViTForImageClassification(size.config).eval()
    precision: Any = "bf16" if device == "cuda" else "no"
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        features = frozen_features(whole, examples, folder, precision=precision)
        extracting = time.perf_counter() - started
        rest = last_encoder(whole)
        # Without a cache: the whole model runs in every step, and gradients reach its last layer and head only.
        whole.requires_grad_(False)
        layers = max((m for m in whole.modules() if isinstance(m, nn.ModuleList)), key=len)
        for part in (layers[-1], whole.classifier):
            part.requires_grad_(True)
        on = torch.device(device)
        peers: dict[str, Callable[[], object]] = {}
        ways = [("cache", rest, features, False), ("recomputed", whole, examples, False)]
        ways += [("step by step", whole, examples, True)] if device == "cuda" else []
        for name, model, data, as_it_is in ways:
            recorder = None if as_it_is else recorder_for(on)
            model.to(on).train()
            step = Recorded(
                Step(ClassifierLoss(model), optimizer_of(model, 1e-4, 0.05), precision=precision), recorder, model
            )
            peers[name] = Epoch(step, Batches(data.to(on), size.batch, on))
        seconds = medians(peers, device, 3)
    print(f"{size.name}, last encoder, {rows} rows: epoch from the cache {seconds['cache'] * 1e3:.0f} ms")
    print(f"  whole model every step   {seconds['recomputed'] / seconds['cache']:.1f} times that")
    if device == "cuda":
        print(f"    and step by step       {seconds['step by step'] / seconds['cache']:.1f} times that")
    print(f"  making the cache         {extracting:.1f} s, once")


@dataclass(frozen=True)
class Epoch:
    """All batches of an epoch, to the end."""

    step: Recorded
    batches: Batches

    def __call__(self) -> None:
        """Train on each."""
        for batch in self.batches.epoch(1):
            self.step(batch)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
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
        steps(size, arguments.device, arguments.repeats)
    for size in sizes:
        cached_epochs(size, arguments.device, size.batch * (16 if gpu else 2))


if __name__ == "__main__":
    main()
