"""Before and after in words: the verdict, the sections of a report, and the same as Markdown for docs."""

import platform
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fairhead import __version__
from fairhead.language.before_after import BeforeAfter, Run
from fairhead.language.benchmark import Label
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


def report_of(found: BeforeAfter, command: str | None = None) -> Report:
    """The report."""
    runs = ", ".join(run.name for run in found.runs)
    sections: list[Section] = []
    level = found.provenance.get("level", 0.95)
    for heading, text in _SECTIONS.items():
        panels = _panels(found, [[c for c in run.headlines if _section(c) == heading] for run in found.runs])
        if panels:
            told = _definitions(found, heading)
            sections.append(
                Changes(title=heading, text=text, base=found.base, level=level, panels=panels, definitions=told)
            )
            if heading == "Attention":
                sections += _entropy_maps(found)
    matrix = spillover(found)
    if matrix.rows:
        sections.insert(min(1, len(sections)), matrix)
    seen = _panels(found, [run.seen for run in found.runs])
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
        judged = [c for c in run.headlines if _section(c) != "Attention"]
        by_outcome = {w: [c for c in judged if c.outcome == w] for w in ("better", "worse", "changed")}
        told = sum(map(len, by_outcome.values()))
        for word, tone in (("better", "good"), ("worse", "bad"), ("changed", "note")):
            if by_outcome[word]:
                listed = "; ".join(said(c, found) for c in by_outcome[word])
                if word == "changed":
                    text = f"{run.name} has changed significantly, but its distance from even has not, in {listed}."
                else:
                    text = f"{run.name} is {word} in {listed}."
                lines.append(Sentence(text, tone))
        apart = sum(c.outcome == "not significant" for c in judged)
        if apart:
            which = f"in the other {apart} figures" if told else f"in any of {apart} figures"
            lines.append(Sentence(f"{run.name} does not differ significantly from {found.base} {which}.", "unclear"))
        lines += _categories(run) + _attention(run)
        if run.unpaired:
            named_ones = ", ".join(f"{benchmark_named(name).title} {count(n)}" for name, n in run.unpaired.items())
            lines.append(Sentence(f"{run.name}: items that only one run has take no part ({named_ones}).", "note"))
    blind = [c for run in found.runs for c in run.headlines if c.value is not None and c.mde is None and c.note]
    for text in dict.fromkeys(f"{_where(found, c)}: {c.note}." for c in blind):
        lines.append(Sentence(text, "note"))
    for name, made in found.provenance.get("runs", {}).items():
        no_numbers = ", ".join(key for key in made["skipped"] if ":" in key)
        if no_numbers:
            text = f"{name}: not compared, because its value of a sample is no number: {no_numbers}."
            lines.append(Sentence(text, "note"))
    precisions = {str(made.get("dtype")) for made in found.provenance.get("runs", {}).values()}
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
        chosen = [c for c in run.by_category if c.value is not None and targeted(run, c) == aimed]
        worse, better = ([c for c in chosen if c.outcome == word] for word in ("worse", "better"))
        if not run.targeted or not chosen or (aimed and not worse and not better):
            continue
        listed = [f" ({'; '.join(map(said, some))})" if some else "" for some in (worse, better)]
        further = sum(c.direction == "further" for c in chosen)
        text = (
            f"{run.name}, {words.format(len(chosen))}, {len(worse)} got significantly worse{listed[0]} and "
            f"{len(better)} better{listed[1]}; further from even than before, significant or not: {further}."
        )
        lines.append(Sentence(text, "bad" if worse else "note"))
    return lines


def _attention(run: Run) -> list[Sentence]:
    lines = []
    if run.collapsed:
        layers = "; ".join(f"layer {c.layer}, entropy {c.before:.2f} → {c.after:.2f}, {c.what}" for c in run.collapsed)
        depth = len(run.entropy or [])
        text = f"{run.name}: attention has collapsed in {len(run.collapsed)} of {depth} layers ({layers})."
        lines.append(Sentence(text, "bad"))
    of_heads = (c for c in run.headlines if benchmark_named(c.benchmark).by_head is not None)
    entropy = next((c for c in of_heads if c.value is not None), None)
    if entropy is not None and not run.collapsed:
        lines.append(Sentence(f"{run.name}: no layer's attention has collapsed; {said(entropy)}.", "note"))
    for change in run.headlines:
        words = benchmark_named(change.benchmark).outcomes.get(change.metric, {})
        if change.outcome in words:
            lines.append(Sentence(f"{run.name}: {said(change)}: {words[change.outcome]}.", "note"))
    return lines


def said(change: Difference, found: BeforeAfter | None = None) -> str:
    """A change in a few words; with the comparison that it is of, also which terms of StereoSet it is about."""
    made = _written(change)
    where = named(change) if found is None else " ".join(filter(None, (_where(found, change), *_which(change))))
    return f"{where} {made.before} → {made.after} ({made.difference}, {made.interval})"


def named(change: Difference) -> str:
    """Benchmark, category and metric of a change."""
    return " ".join(filter(None, (benchmark_named(change.benchmark).title, *_which(change))))


def _which(change: Difference) -> tuple[str | None, str]:
    return change.group_by, _label(change).name


def _unit(change: Difference) -> str:
    return "ratio" if change.relative else "share" if _label(change).share else "number"


def _written(change: Difference) -> WrittenChange:
    return Change.of(change, _unit(change)).written()


def targeted(run: Run, change: Difference) -> bool:
    """Whether a run was trained on the axis that a figure is of."""
    return benchmark_named(change.benchmark).axis(change.group_by) in run.targeted


def spillover(found: BeforeAfter) -> Spillover:
    """The matrix of categories and runs."""
    rows: dict[tuple[str, str, str], list[CategoryChange]] = {}
    for run in found.runs:
        for change in run.by_category:
            more = {"targeted": targeted(run, change), "direction": change.direction}
            rows.setdefault(_place(change), []).append(CategoryChange.of(change, _unit(change), **more))
    complete = {place: cells for place, cells in rows.items() if len(cells) == len(found.runs)}
    return Spillover(
        title="Spill-over: every category",
        text="How far each category moved, aimed at or not. Methods that reduce one bias often stir others: look at "
        "the whole. Percentage points of ss, bias score and the like; differences of group means for BOLD. p-values "
        "are corrected over all cells.",
        columns=[run.name for run in found.runs],
        rows=[
            Category(benchmark=f"{place[0]} {place[2]}", category=place[1], cells=cells)
            for place, cells in complete.items()
        ],
    )


def _place(change: Difference) -> tuple[str, str, str]:
    return benchmark_named(change.benchmark).title, change.group_by or "all", _label(change).name


def _label(change: Difference) -> Label:
    return benchmark_named(change.benchmark).label(change.metric)


def _section(change: Difference) -> str:
    return benchmark_named(change.benchmark).section_of(change.metric)


def _panels(found: BeforeAfter, of_runs: Sequence[Sequence[Difference]]) -> list[ChangePanel]:
    """With one run a panel is a benchmark, with several it is a figure; either way its rows share an axis."""
    several = len(found.runs) > 1
    panels: dict[tuple[str, ...], list[NamedChange]] = {}
    for run, changes in zip(found.runs, of_runs, strict=True):
        for change in changes:
            of_what, unit = _where(found, change), _unit(change)
            metric = " ".join(part for part in (_label(change).name, change.group_by) if part)
            caption = (f"{of_what}: {metric}",) if several else (of_what, unit)
            row = NamedChange.of(
                change,
                unit,
                name=run.name if several else metric,
                note=", ".join(filter(None, [f"n{NBSP}={NBSP}{count(change.n)}", change.note])),
                better="" if several else _better(change),
            )
            panels.setdefault(caption, []).append(row)
    return [ChangePanel(caption=caption[0], changes=rows) for caption, rows in panels.items()]


def _definitions(found: BeforeAfter, section: str) -> dict[str, str]:
    changes = [c for run in found.runs for c in run.headlines if _section(c) == section]
    labels = {f"{benchmark_named(c.benchmark).title} {_label(c).name}": _label(c).says for c in changes}
    return {name: says for name, says in labels.items() if says}


def _where(found: BeforeAfter, change: Difference) -> str:
    benchmark = benchmark_named(change.benchmark)
    of = "pairs" if "pairs" in benchmark.kinds else "terms"
    return f"{benchmark.title} (held-out {of})" if change.benchmark in _held_out(found) else benchmark.title


def _held_out(found: BeforeAfter) -> list[str]:
    """Benchmarks of whose items some were trained on, and left out."""
    return list(dict.fromkeys(change.benchmark for run in found.runs for change in run.seen))


def _better(change: Difference) -> str:
    """Which way is better, for the reader who does not know the figure."""
    if not change.better_way:
        return ""
    if change.ideal == 0.5 or (change.ideal == 0 and _section(change) == "Stereotypes"):
        even = f"50{THIN_SPACE}%" if change.ideal else "0"
        return f"nearer to even ({even}) is better"
    return f"{change.better_way} is better"


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
        table.add_column("before → after", justify="right")
        table.add_column("change (interval)", justify="right")
        table.add_column("would be seen", justify="right")
        for change in run.headlines:
            if change.undefined is None:
                made = _written(change)
                both, moved = f"{made.before} → {made.after}", f"{made.difference} ({made.interval})"
                table.add_row(_GLYPHS[change.outcome], escape(named(change)), both, moved, made.detectable)
        console.print()
        console.print(table)
        for change in run.headlines:
            if change.undefined is not None:
                console.print(f"[dim]–: {escape(named(change))}: {escape(change.undefined)}[/]", highlight=False)
        if run.missing:
            console.print(f"[dim]Only one of the two has {', '.join(run.missing)}[/]", highlight=False)
    console.print("[dim]✓ better, ! worse, ~ changed but neither, ? not significant[/]", highlight=False)
    family = sum(change.p is not None for run in found.runs for change in run.headlines)
    alone = f"Interval and what would be seen are of a figure alone; ✓, ! and ~ also need p < 0.05 among all {family}."
    console.print(f"[dim]{alone}[/]", highlight=False)
    titles = ", ".join(benchmark_named(name).title for name in _held_out(found))
    held_out = f"{titles} without {len(found.left_out_targets)} terms that were trained on. " if titles else ""
    console.print(f"[dim]{held_out}p-values and the spill-over matrix: --html, --json, --markdown[/]", highlight=False)


def markdown_of(found: BeforeAfter) -> str:
    """The figures as Markdown: verdict, headlines, the matrix."""
    level = f"{100 * found.provenance.get('level', 0.95):g} %"
    change = f"change ({level} interval)"
    head = ["", "run", "before", "after", change, "detectable", "p, Holm", "outcome"]
    order = dict.fromkeys((c.benchmark, c.metric, c.group_by) for run in found.runs for c in run.headlines)
    rows = [
        _row(found, run, c)
        for key in order
        for run in found.runs
        for c in run.headlines
        if (c.benchmark, c.metric, c.group_by) == key
    ]
    parts = ["\n".join(f"- {sentence.text}" for sentence in verdict(found))]
    parts += ["### Figures", markdown_table(head, rows, figures=range(2, 7))]
    matrix = spillover(found)
    if matrix.rows:
        head = ["benchmark", "category", *matrix.columns]
        rows = [[row.benchmark, row.category, *map(_matrix_cell, row.cells)] for row in matrix.rows]
        parts += ["### Spill-over", markdown_table(head, rows, figures=range(2, len(head)))]
        parts.append("**bold**: significant; ◎: an axis that was trained on; ↓ nearer to even, ↑ further from it.")
    seen = [(run, c) for run in found.runs for c in run.seen]
    if seen:
        head, rows = ["", "run", "before", "after", "change", "p"], []
        for run, c in seen:
            made = _written(c)
            moved = f"{made.difference} ({made.interval})"
            rows.append([named(c), run.name, made.before, made.after, moved, p_value(c.p)])
        parts += ["### On the terms trained on (circular)", markdown_table(head, rows, figures=range(2, 6))]
    return "\n\n".join(parts) + "\n"


def _row(found: BeforeAfter, run: Run, change: Difference) -> list[str]:
    what = " ".join(filter(None, (_where(found, change), *_which(change))))
    if change.value is None:
        return [what, run.name, "", "", "", "", "", f"undefined: {change.undefined}"]
    made = _written(change)
    outcome = change.outcome if change.outcome == "not significant" else f"**{change.outcome}**"
    outcome += f" ({change.note})" if change.note else ""
    moved = f"{made.difference} ({made.interval})"
    figures = (made.before, made.after, moved, made.detectable, p_value(change.p_adjusted))
    return [what, run.name, *figures, outcome]


def _matrix_cell(cell: CategoryChange) -> str:
    if cell.value is None:
        return "–"
    arrow = {"nearer": "↓", "further": "↑"}.get(cell.direction or "", "")
    text = f"{cell.written().difference} {arrow}".strip()
    text = f"**{text}**" if cell.outcome in ("better", "worse", "changed") else text
    return f"{text} ◎" if cell.targeted else text
