"""The tables of `fairhead locate` and `fairhead ablate` in the terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fairhead.report.wording import head_name, p_value

if TYPE_CHECKING:
    from fairhead.locate.run import Located
    from fairhead.locate.studies import Study


def show_located(console: Console, found: "Located", notes: Sequence[str]) -> None:
    """Verdict, chosen heads, effects of editing them."""
    from fairhead.locate.writeup import verdict

    styles = {"good": "green", "bad": "bold red", "unclear": "yellow", "note": "none"}
    for line in verdict(found):
        console.print(f"- [{styles[line['tone']]}]{escape(line['text'])}[/]", highlight=False)
    for note in (*notes, *found.notes):
        console.print(f"- [dim]{escape(note)}[/]", highlight=False)
    if not found.ranked:
        return
    console.print()
    table = Table(title="Chosen heads, on the reporting half", box=box.SIMPLE_HEAD, title_justify="left")
    gap, apart, coupled = found.head_map, found.separation, found.coupling
    maps = [("direct, logits", gap)]
    maps += [] if found.effect_map is None else [("lost without it", found.effect_map)]
    for title in ("head", *(name for name, _ in maps), "share", "Cohen's d", "AUC", "coupling"):
        table.add_column(title, justify="left" if title == "head" else "right")
    for head in found.ranked:
        table.add_row(
            head_name(*head),
            *(f"{m.gap[head]:+.3f} ({m.low[head]:+.3f} to {m.high[head]:+.3f})" for _, m in maps),
            f"{100 * gap.share[head]:.0f} %" if gap.has_total else "",
            f"{apart.d.value[head]:+.2f}",
            f"{apart.auc.value[head]:.2f}",
            f"{coupled.value[head]:+.2f}",
        )
    console.print(table)
    console.print(effects_table(found.studies))
    for span in found.spans:
        named = zip(span.texts, span.is_attribute, strict=True)
        words = ", ".join(f"[bold]{escape(text)}[/]" if marked else escape(text) for text, marked in named)
        console.print(f"{head_name(*span.head)}: {words}", highlight=False)


_SHOWN = ("cramers_v", "DP", "EOd", "accuracy")


def effects_table(studies: "Sequence[Study]") -> Table:
    """The main metrics before and after each edit, beside their controls; the JSON has all of them."""
    table = Table(title="Effects of editing them", box=box.SIMPLE_HEAD, title_justify="left")
    for title in ("edit", "metric", "before", "after", "change", "p layer", "p norm"):
        table.add_column(title, justify="left" if title in ("edit", "metric") else "right")
    for study in studies:
        norm = {a.change.metric: a for a in study.norm_matched}
        shown = [a for a in study.ablations if a.change.metric in _SHOWN]
        for i, ablation in enumerate(sorted(shown, key=lambda a: _SHOWN.index(a.change.metric))):
            change = ablation.change
            low = "" if change.low is None or change.high is None else f" ({change.low:+.3f} to {change.high:+.3f})"
            # Controls test whether a gap is lowered; for accuracy a fall is the cost, not the aim.
            tested = change.ideal == 0
            table.add_row(
                "" if i else f"{study.kind}, {study.way}",
                {"cramers_v": "V"}.get(change.metric, change.metric),
                f"{change.a:.3f}",
                f"{change.b:.3f}",
                f"{change.value:+.3f}{low}",
                p_value(ablation.p_controls) if tested else "",
                p_value(norm[change.metric].p_controls) if tested and change.metric in norm else "",
            )
    table.caption = "p: of random heads lowering it as much, matched by layer or by how much they write"
    return table
