"""What a training step of KLAAD costs, beside plain cross-entropy and beside asking every layer for its attention.

    python benchmarks/klaad.py --model SmolLM2-135M --data FOLDER [--device cuda] [--batch-size 8 64] [--precision bf16]
    python benchmarks/klaad.py --method balance_pairs ...    # a step of `balance_pairs` beside plain cross-entropy

FOLDER holds `stereoset` as published, and for `balance_pairs` the neutral text `multinli`. All take the same batches
of three sentences a triplet (`balance_pairs`: two, and three texts to preserve), forward, backward and AdamW, in turns,
in one run. "Every layer" is the same loss from `output_attentions=True`, which needs eager attention.

All three launch about as many kernels a step, whatever the size of the batch. KLAAD reads fewer tokens; on a fast GPU
that shows only in batches that are large enough to keep it busy.
"""

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from fairhead.language.generation import write_after
from fairhead.language.packing import plain_row
from fairhead.language.row_layout import Layout
from fairhead.language.scorer import Scorer
from fairhead.mitigate.balance_pairs import BalanceControl, BalancePairs
from fairhead.mitigate.klaad import KLAAD, attention_divergence, pool, triplet_loss
from fairhead.mitigate.triplets import TripletData, batch_of
from fairhead.train.step import shuffled_batches
from machine import interleaved_medians, machine


def cross_entropy_loss(model: Any, examples: list[Any]) -> Tensor:
    """Plain fine-tuning on all sentences of each example, a row a sentence."""
    rows = [plain_row(tokens) for example in examples for tokens in example.sentences]
    inputs = Layout(model, tree=False).inputs(rows)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    loss: Tensor = model(**inputs, labels=labels, use_cache=False).loss
    return loss


def every_layer_loss(model: Any, examples: list[Any], config: KLAAD) -> Tensor:
    """KLAAD as one writes it first: all attention maps and hidden states are asked for, then most are dropped."""
    batch = batch_of(examples, Layout(model, tree=False))
    ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
    out = model(**batch.inputs, output_attentions=True, output_hidden_states=True, use_cache=False)
    n = len(examples)
    labels = ids.masked_fill(mask == 0, -100)[:, 1:]
    ce = [
        cross_entropy(out.logits[side, :-1].flatten(0, 1).float(), labels[side].flatten())
        for side in (slice(0, n), slice(n, 2 * n))
    ]
    kl = attention_divergence(out.attentions[-1], batch, config)
    pooled = pool(out.hidden_states[-1].float(), mask, config.pooling)
    triplet = triplet_loss(pooled[:n], pooled[n : 2 * n], pooled[2 * n :], config.margin)
    return config.ce_weight * (ce[0] + ce[1]) / 2 + config.kl_weight * kl + config.triplet_weight * triplet


@contextmanager
def klaad_loss(model: Any, config: KLAAD) -> Iterator[Callable[[list[Any]], Tensor]]:
    with config.session(model) as loss:
        yield lambda examples: loss(examples)["loss"]


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def compare_steps(asked: argparse.Namespace, batch_size: int) -> None:
    """Print the time of a step of each, and the ratios that are wanted."""
    models: list[Any] = [
        AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32, attn_implementation=kind)
        for kind in ("sdpa", "eager")
    ]
    fast, eager = (model.to(asked.device).eval() for model in models)
    plain = copy.deepcopy(fast)
    config = KLAAD()
    split = TripletData(f"stereoset:{asked.data / 'stereoset'}").read()
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    examples, lengths, *_ = config.prepare(split.train[: 64 * batch_size], tokenizer, 2048)
    batches = [[examples[i] for i in batch] for batch in shuffled_batches(lengths, batch_size, seed=0)]
    as_rows = sum(sum(map(len, example.sentences)) for example in examples) / len(examples)
    as_trees = sum(lengths) / len(lengths)
    print(f"step         {batch_size} triplets, each {as_trees:.1f} tokens as a tree, {as_rows:.1f} as rows")
    with ExitStack() as stack:
        klaad = stack.enter_context(klaad_loss(fast, config))
        losses: dict[str, tuple[Any, Callable[[list[Any]], Tensor]]] = {
            "cross-entropy": (plain, lambda batch: cross_entropy_loss(plain, batch)),
            "KLAAD": (fast, klaad),
            "KLAAD, every layer": (eager, lambda batch: every_layer_loss(eager, batch, config)),
        }
        first = {name: float(loss(batches[0]).detach()) for name, (_, loss) in losses.items()}
        peers: dict[str, Callable[[], object]] = {}
        for name, (model, loss) in losses.items():
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
            peers[name] = _turn(loss, optimizer, cycle(batches), asked)
        seconds = interleaved_medians(peers, asked.repeats, clock=CLOCKS[asked.clock])
    for name, median in seconds.items():
        print(f"step         {name:20s} {1e3 * median / asked.steps:9.1f} ms")
    to_plain = seconds["KLAAD"] / seconds["cross-entropy"]
    to_every = seconds["KLAAD, every layer"] / seconds["KLAAD"]
    apart = abs(first["KLAAD"] - first["KLAAD, every layer"])
    print(f"step         KLAAD takes {to_plain:.2f} times a cross-entropy step (wanted: at most 1.25)")
    print(
        f"step         {to_every:.2f} times as fast as asking every layer (wanted: at least 1.5); losses differ by "
        f"{apart:.1e}"
    )


def compare_balance(asked: argparse.Namespace, batch_size: int) -> None:
    """Print the time of a step of `balance_pairs`, of its control, and of cross-entropy on the same sentences."""
    model: Any = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32)
    model = model.to(asked.device).eval()
    models = {name: copy.deepcopy(model) for name in ("cross-entropy", "balance_pairs", "balance_control")}
    config = BalancePairs(f"multinli:{asked.data / 'multinli'}")
    split = TripletData(f"stereoset:{asked.data / 'stereoset'}").read()
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    scorer, texts = Scorer(model, tokenizer), [item.texts.unrelated for item in split.train]
    own = write_after(scorer, texts, *config.writes)
    examples, lengths, *_ = config.refer(model, config.prepare(split.train[: 32 * batch_size], tokenizer, 2048, own))
    batches = [[examples[i] for i in batch] for batch in shuffled_batches(lengths, batch_size, seed=0)]
    with ExitStack() as stack:
        balance = stack.enter_context(config.session(models["balance_pairs"]))
        control = stack.enter_context(BalanceControl().session(models["balance_control"]))
        losses: dict[str, Callable[[list[Any]], Tensor]] = {
            "cross-entropy": lambda batch: cross_entropy_loss(models["cross-entropy"], batch),
            "balance_pairs": lambda batch: balance(batch)["loss"],
            "balance_control": lambda batch: control(batch)["loss"],
        }
        peers: dict[str, Callable[[], object]] = {}
        for name, loss in losses.items():
            optimizer = torch.optim.AdamW(models[name].parameters(), lr=1e-5, weight_decay=0.0, fused=True)
            peers[name] = _turn(loss, optimizer, cycle(batches), asked)
        seconds = interleaved_medians(peers, asked.repeats, clock=CLOCKS[asked.clock])
    for name, median in seconds.items():
        print(f"step         {name:20s} {1e3 * median / asked.steps:9.1f} ms, {batch_size} examples")
    ratio = seconds["balance_pairs"] / seconds["cross-entropy"]
    print(f"step         balance_pairs takes {ratio:.2f} times a cross-entropy step (wanted: at most 1.5)")


def _turn(
    loss: Callable[[list[Any]], Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Iterator[list[Any]],
    asked: argparse.Namespace,
) -> Callable[[], None]:
    def turn() -> None:
        for _ in range(asked.steps):
            with torch.autocast(torch.device(asked.device).type, torch.bfloat16, enabled=asked.precision == "bf16"):
                value = loss(next(batches))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        if asked.device.startswith("cuda"):
            torch.cuda.synchronize()

    return turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--method", choices=("klaad", "balance_pairs"), default="klaad")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[8])
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--precision", choices=("no", "bf16"), default="no")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: processor time, for a machine with other work"
    )
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    print(machine(arguments.device))
    for batch_size in arguments.batch_size:
        (compare_steps if arguments.method == "klaad" else compare_balance)(arguments, batch_size)


if __name__ == "__main__":
    main()
