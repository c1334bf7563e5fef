"""The tables of `fairhead locate` and `fairhead ablate` in the terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fairhead.report.terminal import TONES
from fairhead.report.wording import head_name, p_value

if TYPE_CHECKING:
    from fairhead.locate.engine import Located


def show_located(console: Console, found: "Located", notes: Sequence[str]) -> None:
    """Verdict, chosen heads, effects of editing them."""
    from fairhead.locate.located_report import verdict

    for line in verdict(found):
        console.print(f"- [{TONES[line['tone']]}]{escape(line['text'])}[/]", highlight=False)
    for note in (*notes, *found.notes):
        console.print(f"- [dim]{escape(note)}[/]", highlight=False)
    if not found.ranked:
        return
    console.print()
    table = Table(title="Chosen heads, on the reporting half", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("head")
    for title, _ in found.words.columns(found, found.ranked[0]):
        table.add_column(title, justify="right")
    for head in found.ranked:
        table.add_row(head_name(*head), *(cell for _, cell in found.words.columns(found, head)))
    console.print(table)
    console.print(_effects(found))
    for text in found.words.lines():
        console.print(text, highlight=False)


def _effects(found: "Located") -> Table:
    """The main figures before and after each edit, beside their controls; the JSON has all of them."""
    table = Table(title="Effects of editing them", box=box.SIMPLE_HEAD, title_justify="left")
    words = found.words
    by_norm = any(study.norm_matched for study in found.studies)
    for title in ("edit", words.figure, "before", "after", "change", "p layer", *(["p norm"] if by_norm else [])):
        table.add_column(title, justify="left" if title in ("edit", words.figure) else "right")
    for study in found.studies:
        norm = {a.change.metric: p_value(a.p_controls) for a in study.norm_matched}
        known = {a.change.metric: a for a in study.ablations}
        for i, ablation in enumerate(known[name] for name in words.in_table if name in known):
            change = ablation.change
            low = "" if change.low is None or change.high is None else f" ({change.low:+.3f} to {change.high:+.3f})"
            # Controls test whether a gap is lowered; a fall of accuracy is the cost, not the aim.
            tested = change.metric in words.gaps
            last = [norm.get(change.metric, "") if tested else ""] if by_norm else []
            table.add_row(
                "" if i else f"{study.kind}, {study.way}",
                {"cramers_v": "V"}.get(change.metric, change.metric),
                f"{change.a:.3f}",
                f"{change.b:.3f}",
                f"{change.value:+.3f}{low}",
                p_value(ablation.p_controls) if tested else "",
                *last,
            )
    table.caption = words.caption
    return table
