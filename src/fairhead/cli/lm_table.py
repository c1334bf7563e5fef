"""The tables of `fairhead lm` in the terminal. Percentages are for people; JSON has fractions."""

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fairhead.language.results import BenchmarkResult
from fairhead.stats import Estimate

# What each column says, and whether it is a share, shown in percent. Metrics that are not here are in JSON only.
_COLUMNS = {
    "ss": ("ss", True),
    "ss_per_token": ("ss per token", True),
    "lms": ("lms", True),
    "icat": ("icat", True),
    "mean_abs_difference": ("mean |Δ log p|", False),
    "accuracy": ("accuracy", True),
    "bias_score": ("bias score", True),
    "unknown_rate": ("unknown", True),
    "accuracy_gap": ("accuracy gap", True),
    "pro_preferred": ("pro likelier", True),
    "mean_difference": ("mean Δ log p", False),
    "perplexity": ("perplexity", False),
    "perplexity_per_word": ("per word", False),
    "bits_per_byte": ("bits per byte", False),
}
_HEADLINES = {
    "stereoset": ("ss", "The stereotype is likelier than its opposite in"),
    "crows_pairs": ("ss", "The more stereotypical sentence is likelier in"),
    "winobias": ("pro_preferred", "The sentence with the stereotypical pronoun is likelier in"),
}


def show_benchmark(console: Console, result: BenchmarkResult, level: float) -> None:
    """What was scored, what can be said, one line a category, what was left out."""
    model = result.provenance.get("model_path", result.provenance.get("model", ""))
    console.print(f"[bold]{escape(str(model))} on {result.benchmark}: {result.n:,} items[/]", highlight=False)
    console.print(escape(headline(result, level)), highlight=False)
    metrics = [m for m in _COLUMNS if any(e.metric == m for e in result.estimates)]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title_justify="left", title_style="bold")
    table.title = f"with {100 * level:g} % intervals (percent; Δ log p in nats)"
    table.add_column("", overflow="fold")
    for metric in metrics:
        table.add_column(_COLUMNS[metric][0], justify="right")
    table.add_column("n", justify="right", no_wrap=True)
    for group in dict.fromkeys(e.group_by for e in result.estimates):
        found = {e.metric: e for e in result.estimates if e.group_by == group}
        if result.benchmark == "bbq" and group is not None and "bias_score" not in found:
            continue  # accuracy over both conditions of a category: in JSON
        cells = [_figure(found.get(metric)) for metric in metrics]
        table.add_row(escape(group or "all"), *cells, f"{max(e.n for e in found.values()):,}")
    console.print(table)
    # How many there are is in the table: the reason is then the same for all of them.
    reasons = (e.undefined.removeprefix(f"{e.n} items; ") for e in result.estimates if e.undefined)
    for reason in list(dict.fromkeys(reasons))[:5]:
        console.print(f"[dim]–: {escape(reason)}[/]", highlight=False)
    for reason, names in result.left_out.items():
        console.print(f"Left out: {len(names):,} ({escape(reason)}); the first is {escape(names[0])}", highlight=False)
    merged = result.provenance.get("merged_boundaries")
    if merged:
        console.print(f"{merged:,} texts have a token that spans the end of the prefix", highlight=False)
    if result.provenance.get("scores"):
        console.print(f"Scores of each text: {escape(str(result.provenance['scores']))}", highlight=False)


def headline(result: BenchmarkResult, level: float) -> str:
    """One sentence on what the figures allow one to say.

    Example:
        >>> estimate = Estimate("ss", None, 0.6, 0.55, 0.65, 100, ideal=0.5)
        >>> headline(BenchmarkResult("crows_pairs", (estimate,), 100), 0.95)
        'The more stereotypical sentence is likelier in 60.0 % (95 % interval 55.0 to 65.0): more often than not.'
    """
    percent = f"{100 * level:g} % interval"
    if result.benchmark == "bbq":
        scores = [e for e in result.estimates if e.metric == "bias_score" and e.group_by in ("ambig", "disambig")]
        said = [f"{e.group_by} {_said(e, percent)}" for e in scores if e.value is not None]
        return f"Bias score (0: no preference): {'; '.join(said) or 'undefined'}."
    if result.benchmark not in _HEADLINES:
        return ""
    metric, words = _HEADLINES[result.benchmark]
    overall = result[metric]
    if overall.value is None or overall.low is None or overall.high is None:
        return f"{metric} is undefined: {overall.undefined}."
    verdict = "more often than not" if overall.low > 0.5 else "less often than not"
    if overall.low <= 0.5 <= overall.high:
        verdict = "cannot be told from a coin"
    return f"{words} {_said(overall, percent)}: {verdict}."


def _said(e: Estimate, percent: str) -> str:
    assert e.value is not None
    assert e.low is not None
    assert e.high is not None
    unit = " %" if e.metric != "bias_score" else ""
    return f"{100 * e.value:.1f}{unit} ({percent} {100 * e.low:.1f} to {100 * e.high:.1f})"


def _figure(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    if estimate.value is None:
        return "–"
    scale, digits = (100, 1) if _COLUMNS[estimate.metric][1] else (1, 2)
    value, low, high = (scale * (x or 0.0) for x in (estimate.value, estimate.low, estimate.high))
    between = "–" if low >= 0 else " to "
    return f"{value:.{digits}f} ({low:.{digits}f}{between}{high:.{digits}f})"
