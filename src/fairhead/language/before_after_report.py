"""Before and after in words: the verdict, the sections of a report, and the same as Markdown for docs."""

import platform
from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fairhead import __version__
from fairhead.language.before_after import BeforeAfter, Run
from fairhead.language.benchmark import Benchmark, Label
from fairhead.language.benchmarks import benchmark_named
from fairhead.report import Report, Sentence
from fairhead.report.sections import Section
from fairhead.report.sections.bench_block import markdown_table
from fairhead.report.sections.changes import (
    Category,
    CategoryChange,
    Change,
    ChangePanel,
    Changes,
    NamedChange,
    Spillover,
    WrittenChange,
)
from fairhead.report.sections.headmap import Headmap
from fairhead.report.wording import THIN_SPACE, count, p_value
from fairhead.stats import Difference

_GLYPHS = {"better": "[green]✓[/]", "worse": "[red]![/]", "changed": "[blue]~[/]", "not significant": "[dim]?[/]"}
NBSP = "\u00a0"
_SECTIONS = {
    "Stereotypes": (
        "Better and worse are about the distance to an even model. Benchmarks that a model was trained on are scored "
        "on terms or pairs that none was trained on; the others had no part in training."
    ),
    "Language": "The price: sense before nonsense, and perplexity of held-out text as a ratio to the first model's.",
    "Scores": (
        "The mean of each metric over the samples that both runs have, as the harness logged them. Better and worse "
        "are about the distance to 1 for accuracies and to 50 % for shares of stereotypes."
    ),
    "Attention": (
        "Where attention differs between a stereotyped sentence and its counterpart, and how spread out attention is "
        "on plain text (1 is uniform, 0 a single token). Tokens that differ draw different attention in any model: a "
        "smaller gap is what such training asks for, and no proof of less bias."
    ),
}


class _Told(NamedTuple):
    """A change, in the words of its benchmark."""

    change: Difference
    benchmark: Benchmark
    label: Label
    where: str  # the benchmark, and which of its items

    @classmethod
    def of(cls, change: Difference, found: BeforeAfter | None = None) -> "_Told":
        """With the comparison that it is of, also which terms or pairs it is about."""
        benchmark = benchmark_named(change.benchmark)
        items = "pairs" if "pairs" in benchmark.kinds else "terms"
        held_out = found is not None and change.benchmark in _held_out(found)
        where = f"{benchmark.title} (held-out {items})" if held_out else benchmark.title
        return cls(change, benchmark, benchmark.label(change.metric), where)

    @property
    def name(self) -> str:
        """Benchmark, category and metric."""
        return " ".join(filter(None, (self.where, self.change.group_by, self.label.name)))

    @property
    def section(self) -> str:
        return self.benchmark.section_of(self.change.metric)

    @property
    def unit(self) -> str:
        return "ratio" if self.change.relative else "share" if self.label.share else "number"

    @property
    def written(self) -> WrittenChange:
        return Change.of(self.change, self.unit).written()

    @property
    def moved(self) -> str:
        return f"{self.written.difference} ({self.written.interval})"

    def __str__(self) -> str:
        made = self.written
        return f"{self.name} {made.before} → {made.after} ({made.difference}, {made.interval})"


def report_of(found: BeforeAfter, command: str | None = None) -> Report:
    """The report."""
    runs = ", ".join(run.name for run in found.runs)
    sections: list[Section] = []
    level = found.provenance.get("level", 0.95)
    for heading, text in _SECTIONS.items():
        of_runs = [
            [told for c in run.headlines if (told := _Told.of(c, found)).section == heading] for run in found.runs
        ]
        panels = _panels(found, of_runs)
        if panels:
            labels = {f"{t.benchmark.title} {t.label.name}": t.label.says for of_run in of_runs for t in of_run}
            definitions = {name: says for name, says in labels.items() if says}
            sections.append(
                Changes(title=heading, text=text, base=found.base, level=level, panels=panels, definitions=definitions)
            )
            if heading == "Attention":
                sections += _entropy_maps(found)
    matrix = spillover(found)
    if matrix.rows:
        sections.insert(min(1, len(sections)), matrix)
    seen = _panels(found, [[_Told.of(c, found) for c in run.seen] for run in found.runs])
    if seen:
        text = (
            "On the terms or pairs that were trained on. This shows that training took hold; it says nothing about "
            "other terms, and no p-value here is corrected."
        )
        sections.append(Changes(title="On the terms trained on", text=text, base=found.base, level=level, panels=seen))
    origin = {"fairhead": __version__, "python": platform.python_version(), "command": command}
    return Report(
        title=f"Before and after: {found.base} and {runs}",
        question=f"What did {runs} change against {found.base}: stereotypes that were aimed at, categories that were "
        "not, the model's language, and its attention? Every figure is paired: both models answered the same items.",
        verdict=verdict(found),
        sections=sections,
        provenance={k: v for k, v in {**origin, **found.provenance}.items() if v is not None},
    )


def verdict(found: BeforeAfter) -> list[Sentence]:
    """What the figures allow one to say, a few sentences per run."""
    lines: list[Sentence] = []
    for run in found.runs:
        judged = [told for c in run.headlines if (told := _Told.of(c, found)).section != "Attention"]
        by_outcome = {w: [t for t in judged if t.change.outcome == w] for w in ("better", "worse", "changed")}
        for word, tone in (("better", "good"), ("worse", "bad"), ("changed", "note")):
            if by_outcome[word]:
                so = f"is {word}"
                if word == "changed":
                    so = "has changed significantly, but its distance from even has not,"
                lines.append(Sentence(f"{run.name} {so} in {'; '.join(map(str, by_outcome[word]))}.", tone))
        apart = sum(t.change.outcome == "not significant" for t in judged)
        if apart:
            which = f"in the other {apart} figures" if any(by_outcome.values()) else f"in any of {apart} figures"
            lines.append(Sentence(f"{run.name} does not differ significantly from {found.base} {which}.", "unclear"))
        lines += _categories(run) + _attention(run)
        if run.unpaired:
            named_ones = ", ".join(f"{benchmark_named(name).title} {count(n)}" for name, n in run.unpaired.items())
            lines.append(Sentence(f"{run.name}: items that only one run has take no part ({named_ones}).", "note"))
    blind = [c for run in found.runs for c in run.headlines if c.value is not None and c.mde is None and c.note]
    notes = dict.fromkeys(f"{_Told.of(c, found).where}: {c.note}." for c in blind)
    made_with = found.provenance.get("runs", {})
    for name, made in made_with.items():
        no_numbers = ", ".join(key for key in made["skipped"] if ":" in key)
        if no_numbers:
            notes[f"{name}: not compared, because its value of a sample is no number: {no_numbers}."] = None
    lines += [Sentence(text, "note") for text in notes]
    precisions = {str(made.get("dtype")) for made in made_with.values()}
    if len(precisions) > 1:
        text = f"The runs differ in precision ({', '.join(sorted(precisions))}): small changes may be its doing."
        lines.append(Sentence(text, "bad"))
    return lines


def _categories(run: Run) -> list[Sentence]:
    """What became of the categories: those that were not aimed at always, the others where something can be said."""
    lines = []
    for aimed, words in (
        (True, "of {} categories that were aimed at"),
        (False, "spill-over: of {} categories that were not aimed at"),
    ):
        chosen = [c for c in run.by_category if c.value is not None and _targeted(run, c) == aimed]
        worse, better = ([str(_Told.of(c)) for c in chosen if c.outcome == word] for word in ("worse", "better"))
        if not run.targeted or not chosen or (aimed and not worse and not better):
            continue
        listed = [f" ({'; '.join(some)})" if some else "" for some in (worse, better)]
        further = sum(c.direction == "further" for c in chosen)
        text = (
            f"{run.name}, {words.format(len(chosen))}, {len(worse)} got significantly worse{listed[0]} and "
            f"{len(better)} better{listed[1]}; further from even than before, significant or not: {further}."
        )
        lines.append(Sentence(text, "bad" if worse else "note"))
    return lines


def _attention(run: Run) -> list[Sentence]:
    lines = []
    headlines = [_Told.of(c) for c in run.headlines]
    entropy = next((t for t in headlines if t.benchmark.by_head is not None and t.change.value is not None), None)
    if run.collapsed:
        layers = "; ".join(f"layer {c.layer}, entropy {c.before:.2f} → {c.after:.2f}, {c.what}" for c in run.collapsed)
        depth = len(run.entropy or [])
        text = f"{run.name}: attention has collapsed in {len(run.collapsed)} of {depth} layers ({layers})."
        lines.append(Sentence(text, "bad"))
    elif entropy is not None:
        lines.append(Sentence(f"{run.name}: no layer's attention has collapsed; {entropy}.", "note"))
    for told in headlines:
        words = told.benchmark.outcomes.get(told.change.metric, {})
        if told.change.outcome in words:
            lines.append(Sentence(f"{run.name}: {told}: {words[told.change.outcome]}.", "note"))
    return lines


def _targeted(run: Run, change: Difference) -> bool:
    """Whether a run was trained on the axis that a figure is of."""
    return benchmark_named(change.benchmark).axis(change.group_by) in run.targeted


def spillover(found: BeforeAfter) -> Spillover:
    """The matrix of categories and runs."""
    rows: dict[tuple[str, str], list[CategoryChange]] = {}
    for run in found.runs:
        for change in run.by_category:
            told, more = _Told.of(change), {"targeted": _targeted(run, change), "direction": change.direction}
            place = f"{told.benchmark.title} {told.label.name}", change.group_by or "all"
            rows.setdefault(place, []).append(CategoryChange.of(change, told.unit, **more))
    return Spillover(
        title="Spill-over: every category",
        text="How far each category moved, aimed at or not. Methods that reduce one bias often stir others: look at "
        "the whole. Percentage points of ss, bias score and the like; differences of group means for BOLD. p-values "
        "are corrected over all cells.",
        columns=[run.name for run in found.runs],
        rows=[
            Category(benchmark=benchmark, category=category, cells=cells)
            for (benchmark, category), cells in rows.items()
            if len(cells) == len(found.runs)
        ],
    )


def _panels(found: BeforeAfter, of_runs: Sequence[Sequence[_Told]]) -> list[ChangePanel]:
    """With one run a panel is a benchmark, with several it is a figure; either way its rows share an axis."""
    several = len(found.runs) > 1
    panels: dict[tuple[str, ...], list[NamedChange]] = {}
    for run, changes in zip(found.runs, of_runs, strict=True):
        for told in changes:
            change = told.change
            metric = " ".join(filter(None, (told.label.name, change.group_by)))
            row = NamedChange.of(
                change,
                told.unit,
                name=run.name if several else metric,
                note=", ".join(filter(None, [f"n{NBSP}={NBSP}{count(change.n)}", change.note])),
                better="" if several else _better(told),
            )
            panels.setdefault((f"{told.where}: {metric}",) if several else (told.where, told.unit), []).append(row)
    return [ChangePanel(caption=caption[0], changes=rows) for caption, rows in panels.items()]


def _held_out(found: BeforeAfter) -> list[str]:
    """Benchmarks of whose items some were trained on, and left out."""
    return list(dict.fromkeys(change.benchmark for run in found.runs for change in run.seen))


def _better(told: _Told) -> str:
    """Which way is better, for the reader who does not know the figure."""
    way, ideal = told.change.better_way, told.change.ideal
    if not way:
        return ""
    if ideal == 0.5 or (ideal == 0 and told.section == "Stereotypes"):
        even = f"50{THIN_SPACE}%" if ideal else "0"
        return f"nearer to even ({even}) is better"
    return f"{way} is better"


def _entropy_maps(found: BeforeAfter) -> list[Section]:
    sections: list[Section] = []
    for run in found.runs:
        before, after = found.base_entropy, run.entropy
        if before is None or after is None or [len(r) for r in before] != [len(r) for r in after]:
            continue
        if len({len(row) for row in before}) != 1:  # a map needs layers of as many heads
            continue
        moved = [[b - a for a, b in zip(*rows, strict=True)] for rows in zip(before, after, strict=True)]
        sections.append(
            Headmap(
                title=f"Attention entropy of each head: {run.name} minus {found.base}",
                text="Positive is flatter attention than before, negative is sharper.",
                measure="change of normalised entropy",
                unit="",
                values=moved,
                selected=[],
            )
        )
    return sections


def show_changes(console: Console, found: BeforeAfter) -> None:
    """Print the verdict, and the headlines of every run in a table."""
    marks = {"good": "[green]✓[/]", "bad": "[red]![/]", "unclear": "[yellow]?[/]", "note": "[blue]i[/]"}
    for sentence in verdict(found):
        console.print(f"{marks[sentence.tone]} {escape(sentence.text)}", highlight=False)
    for run in found.runs:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title_justify="left", title_style="bold")
        table.title = escape(f"{run.name} against {found.base}")
        table.add_column("", width=1)
        table.add_column("", overflow="fold", min_width=14)
        for column in ("before → after", "change (interval)", "would be seen"):
            table.add_column(column, justify="right")
        headlines = [_Told.of(change) for change in run.headlines]
        for told in headlines:
            if told.change.undefined is None:
                both = f"{told.written.before} → {told.written.after}"
                cells = (escape(told.name), both, told.moved, told.written.detectable)
                table.add_row(_GLYPHS[told.change.outcome], *cells)
        console.print()
        console.print(table)
        for told in headlines:
            if told.change.undefined is not None:
                console.print(f"[dim]–: {escape(told.name)}: {escape(told.change.undefined)}[/]", highlight=False)
        if run.missing:
            console.print(f"[dim]Only one of the two has {', '.join(run.missing)}[/]", highlight=False)
    family = sum(change.p is not None for run in found.runs for change in run.headlines)
    titles = ", ".join(benchmark_named(name).title for name in _held_out(found))
    held_out = f"{titles} without {len(found.left_out_targets)} terms that were trained on. " if titles else ""
    for line in (
        "✓ better, ! worse, ~ changed but neither, ? not significant",
        f"Interval and what would be seen are of a figure alone; ✓, ! and ~ also need p < 0.05 among all {family}.",
        f"{held_out}p-values and the spill-over matrix: --html, --json, --markdown",
    ):
        console.print(f"[dim]{line}[/]", highlight=False)


def markdown_of(found: BeforeAfter) -> str:
    """The figures as Markdown: verdict, headlines, the matrix."""
    level = f"{100 * found.provenance.get('level', 0.95):g} %"
    head = ["", "run", "before", "after", f"change ({level} interval)", "detectable", "p, Holm", "outcome"]
    every = [(run, c) for run in found.runs for c in run.headlines]
    order = list(dict.fromkeys((c.benchmark, c.metric, c.group_by) for _, c in every))
    every.sort(key=lambda one: order.index((one[1].benchmark, one[1].metric, one[1].group_by)))
    rows = [_row(_Told.of(c, found), run) for run, c in every]
    parts = ["\n".join(f"- {sentence.text}" for sentence in verdict(found))]
    parts += ["### Figures", markdown_table(head, rows, figures=range(2, 7))]
    matrix = spillover(found)
    if matrix.rows:
        head = ["benchmark", "category", *matrix.columns]
        rows = [[row.benchmark, row.category, *map(_matrix_cell, row.cells)] for row in matrix.rows]
        parts += ["### Spill-over", markdown_table(head, rows, figures=range(2, len(head)))]
        parts.append("**bold**: significant; ◎: an axis that was trained on; ↓ nearer to even, ↑ further from it.")
    seen = [(run, _Told.of(c)) for run in found.runs for c in run.seen]
    if seen:
        head = ["", "run", "before", "after", "change", "p"]
        rows = [[t.name, run.name, *t.written[:2], t.moved, p_value(t.change.p)] for run, t in seen]
        parts += ["### On the terms trained on (circular)", markdown_table(head, rows, figures=range(2, 6))]
    return "\n\n".join(parts) + "\n"


def _row(told: _Told, run: Run) -> list[str]:
    change = told.change
    if change.value is None:
        return [told.name, run.name, "", "", "", "", "", f"undefined: {change.undefined}"]
    outcome = change.outcome if change.outcome == "not significant" else f"**{change.outcome}**"
    outcome += f" ({change.note})" if change.note else ""
    figures = (*told.written[:2], told.moved, told.written.detectable, p_value(change.p_adjusted))
    return [told.name, run.name, *figures, outcome]


def _matrix_cell(cell: CategoryChange) -> str:
    if cell.value is None:
        return "–"
    arrow = {"nearer": "↓", "further": "↑"}.get(cell.direction or "", "")
    text = f"{cell.written().difference} {arrow}".strip()
    text = f"**{text}**" if cell.outcome in ("better", "worse", "changed") else text
    return f"{text} ◎" if cell.targeted else text
