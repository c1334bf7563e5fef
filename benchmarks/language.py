"""The scoring engine beside lm-evaluation-harness: same model, same texts, same precision, interleaved, in one run.

    pip install lm-eval
    python benchmarks/language.py --model SmolLM2-135M --data FOLDER [--items 60] [--device cuda]
        [--dtype float32 bfloat16]

FOLDER holds `bbq`, `crows_pairs` and `stereoset` as published. Prints texts a second of each, their ratio, and the
largest difference of the log-likelihoods of a text, from each other and from fairhead's in 32 bits; the harness is
given several batch sizes, and its best counts. Also, of one run each, what part of the time passes before the model is
first called, within its calls, and after the last. `--seconds` bounds the time of each benchmark: it is then repeated
less often. Items are drawn in whole templates, as a full run meets them. Then what a step of KLAAD costs (`klaad.py`).

What texts begin with alike is read once. `--tokens` only counts how many tokens that leaves (the last token of a text,
from which nothing follows, is read by neither), says what a token costs, and from both how much less work than the
harness's is the least that must be done. A token's state depends on all tokens before it: each distinct beginning must
go through the layers once, and each that a scored token follows through the whole vocabulary, since a probability needs
the sum over it.
"""

import argparse
import copy
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
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


class Timeline:
    """When a model is called, by the clock of its device."""

    def __init__(self, model: Any) -> None:
        self._hooks = [model.register_forward_pre_hook(self._mark), model.register_forward_hook(self._mark)]
        self._cuda = model.device.type == "cuda"
        self._marks: list[Any] = []

    def _mark(self, *_: object) -> None:
        self._marks.append(self._now())

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def parts(self, run: Callable[[], object]) -> str:
        """What part of the time passes before, in, between and after the calls."""
        if self._cuda:
            torch.cuda.synchronize()
        self._marks = [self._now()]
        run()
        self._mark()
        if self._cuda:
            torch.cuda.synchronize()
            times = [self._marks[0].elapsed_time(mark) / 1000 for mark in self._marks]
        else:
            times = [mark - self._marks[0] for mark in self._marks]
        for hook in self._hooks:
            hook.remove()
        within = sum(times[i + 1] - times[i] for i in range(1, len(times) - 2, 2))
        before, after = times[1], times[-1] - times[-2]
        between = times[-1] - before - within - after
        shares = {"before": before, "in": within, "between": between, "after": after}
        said = ", ".join(f"{name} {part / times[-1]:.0%}" for name, part in shares.items())
        return f"{1000 * times[-1]:.0f} ms in {len(times) // 2 - 1} calls of the model: {said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--items", type=int, default=60)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[4, 16], help="of the harness")
    parser.add_argument("--batch-tokens", type=int, help="of fairhead, and of a row of its batches: --row-tokens")
    parser.add_argument("--row-tokens", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="to spend on a benchmark in a precision")
    parser.add_argument("--only", choices=["bbq", "crows", "stereoset", "klaad"], help="one of these parts")
    parser.add_argument("--tokens", action="store_true", help="only count the tokens that are read")
    parser.add_argument("--random-weights", action="store_true", help="of the model's configuration, for its speed")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: processor time, for a machine with other work"
    )
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    hf_logging.disable_progress_bar()
    harness_version = [] if arguments.tokens else [f"lm-eval {import_module('lm_eval').__version__}"]
    print(machine(arguments.device), *harness_version, sep=", ", flush=True)
    if arguments.random_weights:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments.model), dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    model = model.to(arguments.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    # The harness puts BOS only where nothing else stands before, unless the tokeniser itself adds one.
    adds_bos = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    build = partial(
        Scorer,
        tokenizer=tokenizer,
        batch_tokens=arguments.batch_tokens,
        row_tokens=arguments.row_tokens,
        convention="fairhead" if adds_bos else "lm-eval",
    )
    scorer = build(model)
    asked = {
        name: (title, wanted, requests_of(arguments.data, arguments.items))
        for name, title, requests_of, wanted in (
            ("crows", "CrowS-Pairs", crows_requests, 3.0),
            ("stereoset", "StereoSet", stereoset_requests, 3.0),
            ("bbq", "BBQ", bbq_requests, 5.0),
        )
        if arguments.only in (None, name)
    }
    if arguments.tokens:
        counted = {
            title: count_tokens(title, requests, scorer, arguments.batch_size) for title, _, requests in asked.values()
        }
        cost = cost_of_a_token(model)
        for title, tokens in counted.items():
            least = tokens.saved(*cost)
            print(f"{title:12s} sharing every beginning is {least:.2f} times less work than the harness does")
        return
    full = {name: logprobs(scorer, requests) for name, (_, _, requests) in asked.items()}
    for dtype in arguments.dtype:
        scorer = build(copy.deepcopy(model).to(getattr(torch, dtype)))
        for name, (title, wanted, requests) in asked.items():
            print(f"{title}, {len(requests)} texts, {dtype}", flush=True)
            compare(requests, wanted, scorer, full[name], arguments)
    if arguments.only in (None, "klaad"):
        precision = "no" if arguments.dtype == ["float32"] else "bf16"
        steps = {**vars(arguments), "precision": precision, "steps": 2, "clock": "wall"}
        compare_steps(argparse.Namespace(**steps), batch_size=8)


def logprobs(scorer: Scorer, requests: Sequence[Request]) -> list[float]:
    scores = scorer.score(requests)
    return [scores[r.id].logprob for r in requests]


def compare(
    requests: Sequence[Request], wanted: float, scorer: Scorer, full: Sequence[float], arguments: argparse.Namespace
) -> None:
    """Print what each side takes, and how far its scores are from fairhead's in 32 bits."""
    clock = time.process_time if arguments.clock == "cpu" else time.perf_counter
    variants: dict[str, Callable[[], list[float]]] = {"fairhead": partial(logprobs, scorer, requests)}
    for size in arguments.batch_size:
        score = harness(scorer.model, scorer.tokenizer, size)
        variants[f"lm-eval, batch {size}"] = partial(score, requests)
    found: dict[str, list[float]] = {}
    began = time.perf_counter()
    for name, scores in list(variants.items()):
        begun = time.perf_counter()
        try:
            found[name] = scores()
        except torch.OutOfMemoryError:
            print(f"  {name:20s} out of memory", flush=True)
            del variants[name]
            continue
        print(f"  {name:20s} first run {time.perf_counter() - begun:.2f} s", flush=True)
    # `interleaved_medians` has one turn more than it is told.
    affordable = arguments.seconds // (time.perf_counter() - began) - 2
    seconds = interleaved_medians(dict(variants), int(max(1, min(arguments.repeats, affordable))), clock=clock)
    for name, median in seconds.items():
        off = max(abs(a - b) for a, b in zip(found[name], full, strict=True))
        print(f"  {name:20s} {len(requests) / median:9.1f} texts/s, off 32 bits by at most {off:.1e}")
        print(f"  {'':20s} {Timeline(scorer.model).parts(variants[name])}", flush=True)
    best = min((s, name) for name, s in seconds.items() if name != "fairhead")
    apart = max(abs(a - b) for a, b in zip(found["fairhead"], found[best[1]], strict=True))
    print(f"  {best[0] / seconds['fairhead']:.2f} times {best[1]} (wanted: {wanted}); apart by at most {apart:.1e}")


if __name__ == "__main__":
    main()
