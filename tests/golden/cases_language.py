"""Language models: the benchmarks, the suite of them, and two models compared."""

import json
from functools import cache

from figures import TORCH, Case, as_json, run, scratch
from made_benchmarks import save_model, write_benchmarks

SUITE = ("stereoset", "crows_pairs", "bbq", "winobias", "perplexity", "attention_entropy", "attention_gap", "bold")
QUICK = ("--device", "cpu", "--n-boot", 200)


@cache
def made():
    """A folder with `data`, and the models `one` and `other`; made once a process."""
    root = scratch()
    write_benchmarks(root / "data")
    save_model(root / "one", seed=0)
    save_model(root / "other", seed=1)
    return root


@cache
def suite_of(name):
    root = made()
    lexicons = ("--lexicons", root / "data/lexicons")
    run(
        "lm", "suite", "--model", root / name, "--data", root / "data", "--out", root / f"run-{name}", *lexicons, *QUICK
    )
    return root / f"run-{name}"


def suite(benchmark):
    return lambda folder: json.loads((suite_of("one") / f"{benchmark}.json").read_text())


def compared(folder):
    return as_json("lm", "compare", suite_of("one"), suite_of("other"), "--n-boot", 200, "--n-perm", 2000)


def single(command, data, *options):
    def figures(folder):
        place = data.format(made() / "data")
        return as_json("lm", command, "--model", made() / "one", "--data", place, *QUICK, *options)

    return figures


def bold(folder):
    sampling = ("--max-new-tokens", 12, "--top-k", 5, "--temperature", 0.7, "--seed", 1, "--domain", "gender")
    return single("bold", "{}/bold", *sampling)(folder)


CASES = {
    **{f"lm_suite_{benchmark}": Case(suite(benchmark), TORCH) for benchmark in SUITE},
    "lm_compare": Case(compared, TORCH),
    "lm_stereoset_start": Case(single("stereoset", "{}/stereoset", "--as", "lm-eval"), TORCH),
    "lm_crows_limit": Case(single("crows", "{}/crows_pairs", "--limit", 40, "--seed", 2, "--level", 0.9), TORCH),
    "lm_bbq_qa": Case(single("bbq", "{}/bbq", "--prompt", "qa", "--category", "Age"), TORCH),
    "lm_perplexity_window": Case(single("perplexity", "{}/text.txt", "--window", 16), TORCH),
    "lm_attention_crows": Case(single("attention", "crows:{}/crows_pairs"), TORCH),
    "lm_attention_stereoset": Case(
        single("attention", "stereoset:{}/stereoset", "--layer", 0, "--average", "after", "--no-start-token"), TORCH
    ),
    "lm_bold_sampled": Case(bold, TORCH),
}
