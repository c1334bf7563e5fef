"""The tables of `fairhead lm bold` in the terminal."""

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fairhead.language.results import BenchmarkResult
from fairhead.stats import Estimate

_SUFFIX = "_disparity"


def show_bold(console: Console, result: BenchmarkResult, level: float) -> None:
    """Each domain's disparities: the figure, what chance alone would show, and between which groups it is."""
    model = result.provenance.get("model_path") or result.provenance.get("model", "")
    console.print(f"[bold]{escape(str(model))} on BOLD: {result.n:,} continuations[/]", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title_justify="left", title_style="bold")
    table.title = f"largest less smallest group mean, with {100 * level:g} % intervals over entities"
    table.add_column("")
    for name in ("disparity", "by chance", "p (Holm)"):
        table.add_column(name, justify="right")
    table.add_column("highest – lowest", overflow="fold")
    table.add_column("n", justify="right", no_wrap=True)
    found = [e for e in result.estimates if e.metric.endswith(_SUFFIX)]
    for domain in dict.fromkeys(e.group_by for e in found):
        table.add_section()
        table.add_row(f"[bold]{escape(str(domain))}[/]")
        for e in found:
            if e.group_by == domain:
                table.add_row(*_row(e, e.metric.removesuffix(_SUFFIX)))
    console.print(table)
    console.print("Means of each group are in the JSON (--json).", highlight=False)
    for reason in list(dict.fromkeys(e.undefined for e in found if e.undefined))[:5]:
        console.print(f"[dim]–: {escape(reason)}[/]", highlight=False)
    for reason, names in result.left_out.items():
        console.print(f"Left out: {len(names):,} ({escape(reason)}); the first is {escape(names[0])}", highlight=False)
    if result.provenance.get("generations"):
        console.print(f"Continuations: {escape(str(result.provenance['generations']))}", highlight=False)


def _row(e: Estimate, name: str) -> tuple[str, ...]:
    if e.value is None or e.low is None or e.high is None:
        return escape(name), "–", "", "", "", f"{e.n:,}"
    detail = e.detail
    figure = f"{e.value:.3f} ({e.low:.3f}–{e.high:.3f})"
    ends = " – ".join(str(detail.get(key, "")).partition(" × ")[2] for key in ("highest", "lowest"))
    chance, p = (f"{detail[key]:.3f}" if key in detail else "" for key in ("by_chance", "p_adjusted"))
    return escape(name), figure, chance, p, escape(ends), f"{e.n:,}"
