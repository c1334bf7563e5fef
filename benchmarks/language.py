"""The scoring engine beside lm-evaluation-harness: same model, same texts, same precision, interleaved, in one run.

    pip install lm-eval
    python benchmarks/language.py --model SmolLM2-135M --data FOLDER [--items 60] [--device cuda] [--dtype bfloat16]

FOLDER holds `bbq`, `crows_pairs` and `stereoset` as published. Prints texts a second of each, their ratio, and the
largest difference of the log-likelihoods of a text; the harness is given several batch sizes, and its best counts.
Items are drawn in whole templates, as a full run meets them. Then what a step of KLAAD costs (`klaad.py`).

What texts begin with alike is read once. `--tokens` only counts how many tokens that leaves (the last token of a text,
from which nothing follows, is read by neither), says what a token costs, and from both how much less work than the
harness's is the least that must be done. A token's state depends on all tokens before it: each distinct beginning must
go through the layers once, and each that a scored token follows through the whole vocabulary, since a probability needs
the sum over it.
"""

import argparse
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from fairhead.data.sentences import read_bbq
from fairhead.language import Request
from fairhead.language.benchmarks import bbq, crows_pairs, stereoset
from fairhead.language.benchmarks.crows_pairs import read_crows_pairs
from fairhead.language.benchmarks.stereoset import read_stereoset
from fairhead.language.packing import encode
from fairhead.language.scorer import Scorer
from klaad import compare_steps
from machine import interleaved_medians, machine


def bbq_requests(folder: Path, items: int) -> list[Request]:
    """Items of whole templates, in the words that the harness uses."""
    # The published order keeps a template's items together.
    return bbq.requests(read_bbq(folder / "bbq")[:items], bbq.Options(prompt="qa"))


def crows_requests(folder: Path, items: int) -> list[Request]:
    return crows_pairs.requests(read_crows_pairs(folder / "crows_pairs")[:items])


def stereoset_requests(folder: Path, items: int) -> list[Request]:
    """As many sentences with a blank as after a context."""
    found = read_stereoset(folder / "stereoset")
    return stereoset.requests([*found[: items // 2], *found[-(items - items // 2) :]])


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


class Tokens(NamedTuple):
    """What must be read of texts."""

    harness: int  # by the harness, padding included, at its best batch size
    distinct: int  # beginnings that differ: they go through the layers
    predicting: int  # of these, those that a scored token follows: they go through the vocabulary

    def saved(self, layers: float, vocabulary: float, distribution: float) -> float:
        """How many times less work than the harness's is the least that must be done, by what a token costs."""
        return (
            self.harness
            * (layers + vocabulary + distribution)
            / (self.distinct * layers + self.predicting * vocabulary)
        )


def count_tokens(name: str, requests: Sequence[Request], scorer: Scorer, batch_sizes: Sequence[int]) -> Tokens:
    """Tokens that the harness reads, with its padding, and that are left where beginnings are shared."""
    encoded = encode(requests, scorer.tokenizer, scorer.start_token, scorer.convention)
    # As the harness sorts texts; those that differ in their last token alone it reads once, too.
    lengths = sorted(map(len, {tuple(one.sequence.tokens[:-1]) for one in encoded}), reverse=True)
    # A batch is padded to its first text.
    padded = {n: sum(lengths[i] * len(lengths[i : i + n]) for i in range(0, len(lengths), n)) for n in batch_sizes}
    rows = [row for batch in scorer.planned([one.sequence for one in encoded]) for row in batch.rows]
    read = sum(int(row.followed.sum()) for row in rows)
    alone = sum(len(one.sequence.tokens) - 1 for one in encoded)
    print(f"{name:12s} {len(requests):,} texts: {alone:,} tokens, shared {read:,}, {alone / read:.2f} times fewer")
    for size, count in padded.items():
        print(f"{name:12s} padded in batches of {size}: {count:,}, {count / read:.2f} times as many as are shared")
    texts = [(tuple(one.sequence.tokens), one.sequence.scored_from) for one in encoded]
    distinct = {tokens[:k] for tokens, _ in texts for k in range(1, len(tokens))}
    predicting = {tokens[:k] for tokens, scored_from in texts for k in range(scored_from, len(tokens))}
    print(f"{name:12s} {len(distinct):,} distinct beginnings; {len(predicting):,} have a scored token after them")
    return Tokens(min(padded.values()), len(distinct), len(predicting))


def cost_of_a_token(model: Any) -> list[float]:
    """What a token costs in the layers, in the vocabulary and after it, in ms, where nothing is shared."""
    ids = torch.randint(model.config.vocab_size, (16, 16), device=model.device)
    with torch.no_grad():
        states = model.base_model(ids).last_hidden_state
        output = model.get_output_embeddings()
        logits = output(states)
        parts: dict[str, Callable[[], object]] = {
            "layers": partial(model.base_model, ids),
            "vocabulary": partial(output, states),
            "distribution and maximum": lambda: logits.log_softmax(-1).argmax(-1),
        }
        seconds = interleaved_medians(parts, 3, clock=time.process_time)
    cost = {name: 1000 * one / ids.numel() for name, one in seconds.items()}
    print(*(f"{name} {one:.2f} ms" for name, one in cost.items()), sep=", ", end=" a token\n")
    return list(cost.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--items", type=int, default=60)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=["bbq", "crows", "stereoset", "klaad"], help="one of these parts")
    parser.add_argument("--tokens", action="store_true", help="only count the tokens that are read")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: processor time, for a machine with other work"
    )
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    hf_logging.disable_progress_bar()
    harness_version = [] if arguments.tokens else [f"lm-eval {import_module('lm_eval').__version__}"]
    print(machine(arguments.device), *harness_version, sep=", ")

    dtype = getattr(torch, arguments.dtype)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).to(arguments.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    # The harness puts BOS only where nothing else stands before, unless the tokeniser itself adds one.
    adds_bos = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    scorer = Scorer(model, tokenizer, convention="fairhead" if adds_bos else "lm-eval")
    harnesses = {} if arguments.tokens else {s: harness(model, tokenizer, s) for s in arguments.batch_size}
    counted: dict[str, Tokens] = {}
    for name, title, requests_of, wanted in (
        ("bbq", "BBQ", bbq_requests, 5.0),
        ("crows", "CrowS-Pairs", crows_requests, 3.0),
        ("stereoset", "StereoSet", stereoset_requests, 3.0),
    ):
        if arguments.only not in (None, name):
            continue
        if arguments.tokens:
            found = requests_of(arguments.data, arguments.items)
            counted[title] = count_tokens(title, found, scorer, arguments.batch_size)
        else:
            compare(title, requests_of(arguments.data, arguments.items), wanted, scorer, harnesses, arguments)
    if arguments.tokens:
        cost = cost_of_a_token(model)
        for title, tokens in counted.items():
            least = tokens.saved(*cost)
            print(f"{title:12s} sharing every beginning is {least:.2f} times less work than the harness does")
    elif arguments.only in (None, "klaad"):
        precision = "no" if dtype is torch.float32 else "bf16"
        steps = {**vars(arguments), "precision": precision, "steps": 2, "clock": "wall"}
        compare_steps(argparse.Namespace(**steps), batch_size=8)


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
