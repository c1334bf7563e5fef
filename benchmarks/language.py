"""The scoring engine beside lm-evaluation-harness: same model, same texts, same precision, interleaved, in one run.

    pip install lm-eval
    python benchmarks/language.py --model SmolLM2-135M --data FOLDER [--items 60] [--device cuda] [--dtype bfloat16]

FOLDER holds `bbq`, `crows_pairs` and `stereoset` as published. Prints texts a second of each, their ratio, and the
largest difference of the log-likelihoods of a text; the harness is given several batch sizes, and its best counts.
Items are drawn in whole templates, as a full run meets them. Then what a step of KLAAD costs (`klaad.py`).

Of CrowS-Pairs, what a pair begins with is read once, and the last token of a sentence, from which nothing follows, not
at all: over all 1 508 pairs 1.4 times fewer tokens than the harness reads. The rest of the gain is in the vocabulary:
one sum for each token instead of a distribution and its maximum.
"""

import argparse
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from fairhead.language import Request
from fairhead.language.benchmarks import bbq, crows_pairs
from fairhead.language.benchmarks.bbq import read_bbq
from fairhead.language.benchmarks.crows_pairs import read_crows_pairs
from fairhead.language.scorer import Scorer
from klaad import compare_steps
from machine import interleaved_medians, machine


def bbq_requests(folder: Path, items: int) -> list[Request]:
    """Items of whole templates, in the words that the harness uses."""
    # The published order keeps a template's items together.
    return bbq.requests(read_bbq(folder / "bbq")[:items], bbq.Options(prompt="qa"))


def crows_requests(folder: Path, items: int) -> list[Request]:
    return crows_pairs.requests(read_crows_pairs(folder / "crows_pairs")[:items])


def harness(model: Any, tokenizer: Any, batch_size: int) -> Callable[[Sequence[Request]], list[float]]:
    """Log-likelihoods by lm-evaluation-harness."""
    lm = import_module("lm_eval.models.huggingface").HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=batch_size, backend="causal"
    )
    instance = import_module("lm_eval.api.instance").Instance

    def score(requests: Sequence[Request]) -> list[float]:
        asked = [
            instance(request_type="loglikelihood", doc={}, arguments=(r.prefix, r.continuation), idx=i)
            for i, r in enumerate(requests)
        ]
        return [float(found[0]) for found in lm.loglikelihood(asked, disable_tqdm=True)]

    return score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--items", type=int, default=60)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=["bbq", "crows", "klaad"], help="one of the three parts")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: processor time, for a machine with other work"
    )
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    hf_logging.disable_progress_bar()
    print(machine(arguments.device), f"lm-eval {import_module('lm_eval').__version__}", sep=", ")

    dtype = getattr(torch, arguments.dtype)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).to(arguments.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    # The harness puts BOS only where nothing else stands before, unless the tokeniser itself adds one.
    adds_bos = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    scorer = Scorer(model, tokenizer, convention="fairhead" if adds_bos else "lm-eval")
    harnesses = {size: harness(model, tokenizer, size) for size in arguments.batch_size}
    if arguments.only in (None, "bbq"):
        compare("BBQ", bbq_requests(arguments.data, arguments.items), 3.0, scorer, harnesses, arguments)
    if arguments.only in (None, "crows"):
        compare("CrowS-Pairs", crows_requests(arguments.data, arguments.items), 1.5, scorer, harnesses, arguments)
    if arguments.only in (None, "klaad"):
        precision = "no" if dtype is torch.float32 else "bf16"
        compare_steps(arguments.model, arguments.data, arguments.device, arguments.repeats, precision=precision)


def compare(
    name: str,
    requests: Sequence[Request],
    wanted: float,
    scorer: Scorer,
    harnesses: dict[int, Callable[[Sequence[Request]], list[float]]],
    arguments: argparse.Namespace,
) -> None:
    scores = scorer.score(requests)
    ours = [scores[r.id].logprob for r in requests]
    theirs = next(iter(harnesses.values()))(requests)
    apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    variants: dict[str, Callable[[], object]] = {"fairhead": partial(scorer.score, requests)}
    for size, score in harnesses.items():
        variants[f"lm-eval, batch {size}"] = partial(score, requests)
    clock = time.process_time if arguments.clock == "cpu" else time.perf_counter
    seconds = interleaved_medians(variants, arguments.repeats, clock=clock)
    for variant, median in seconds.items():
        print(f"{name:12s} {variant:20s} {len(requests) / median:9.1f} texts/s")
    ratio = min(s for variant, s in seconds.items() if variant != "fairhead") / seconds["fairhead"]
    print(f"{name:12s} {ratio:.2f} times the harness (wanted: {wanted}); log-likelihoods differ by at most {apart:.1e}")


if __name__ == "__main__":
    main()
