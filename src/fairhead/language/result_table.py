"""The figures of language benchmarks in the terminal. Percentages are for people; JSON has fractions."""

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fairhead.language.benchmark import Benchmark, TextTable
from fairhead.language.item_table import BenchmarkResult
from fairhead.language.suite import Suite
from fairhead.stats import Estimate


def show_benchmark(console: Console, result: BenchmarkResult) -> None:
    """What was measured, what can be said, one line a category, what was left out."""
    benchmark, level = result.said_by()
    known = result.provenance
    model = known.get("model_path") or known.get("model", "")
    console.print(f"[bold]{escape(str(model))} on {result.benchmark}: {result.n:,} items[/]", highlight=False)
    sentences = benchmark.sentences(result, level)
    for sentence in sentences:
        console.print(f"{'- ' if len(sentences) > 1 else ''}{escape(sentence)}", highlight=False)
    shown = by_category(benchmark, result, level) if benchmark.shown is None else benchmark.shown(result, level)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title_justify="left", title_style="bold")
    table.title = escape(shown.title)
    table.add_column("", overflow="fold")
    for name in shown.columns:
        table.add_column(escape(name), justify="right", overflow="fold", no_wrap=name == "n")
    for row in shown.rows:
        if len(row) == 1:
            table.add_section()
            table.add_row(f"[bold]{escape(row[0])}[/]")
        else:
            table.add_row(*map(escape, row))
    console.print(table)
    for note in shown.notes:
        console.print(escape(note), highlight=False)
    # How many there are is in the table: the reason is then the same for all of them.
    reasons = (e.undefined.removeprefix(f"{e.n} items; ") for e in result.estimates if e.undefined)
    for reason in list(dict.fromkeys(reasons))[:5]:
        console.print(f"[dim]–: {escape(reason)}[/]", highlight=False)
    for reason, names in result.left_out.items():
        console.print(f"Left out: {len(names):,} ({escape(reason)}); the first is {escape(names[0])}", highlight=False)
    if known.get("merged_boundaries"):
        console.print(f"{known['merged_boundaries']:,} texts have a token that spans the end of the prefix")
    for key, what in (("scores", "Scores of each text"), ("generations", "Continuations")):
        if known.get(key):
            console.print(f"{what}: {escape(str(known[key]))}", highlight=False)


def by_category(benchmark: Benchmark, result: BenchmarkResult, level: float) -> TextTable:
    """A row a category with the metrics that have a label."""
    metrics = [metric for metric in benchmark.labels if any(e.metric == metric for e in result.estimates)]
    rows = []
    for group in dict.fromkeys(e.group_by for e in result.estimates):
        found = {e.metric: e for e in result.estimates if e.group_by == group}
        if group is None or not benchmark.hides(group):
            cells = [_figure(found.get(metric), benchmark.label(metric).share) for metric in metrics]
            rows.append((group or "all", *cells, f"{max(e.n for e in found.values()):,}"))
    title = f"with {100 * level:g} % intervals (percent; Δ log p in nats)"
    return TextTable(title, (*(benchmark.label(metric).name for metric in metrics), "n"), rows)


def _figure(estimate: Estimate | None, share: bool) -> str:
    if estimate is None:
        return ""
    if estimate.value is None:
        return "–"
    scale, digits = (100, 1) if share else (1, 2)
    value, low, high = (scale * (x or 0.0) for x in (estimate.value, estimate.low, estimate.high))
    between = "–" if low >= 0 else " to "
    return f"{value:.{digits}f} ({low:.{digits}f}{between}{high:.{digits}f})"


def show_suite(console: Console, suite: Suite) -> None:
    """What was run, and what was not."""
    console.print(f"[bold]{escape(suite.model)}[/] in {escape(str(suite.folder))}", highlight=False)
    for name, facts in suite.done.items():
        left_out = "; ".join(f"left out: {n:,} ({escape(reason)})" for reason, n in facts["left_out"].items())
        seconds = "" if facts["seconds"] is None else f", {facts['seconds']:g} s"
        console.print(
            f"  {name}: {facts['items']:,} items{seconds}{'; ' if left_out else ''}{left_out}", highlight=False
        )
    for name, reason in suite.skipped.items():
        console.print(f"  {name}: skipped, {escape(reason)}", highlight=False)
    console.print(f"Compare with another run: fairhead lm compare {escape(str(suite.folder))} OTHER", highlight=False)
