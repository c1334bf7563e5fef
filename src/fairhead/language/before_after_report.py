"""Before and after: what a comparison found, and the same in words: the verdict, the sections of a report."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from rich.console import Console

from fairhead import __version__
from fairhead.language.benchmark import Benchmark, Label
from fairhead.language.benchmarks import benchmark_named
from fairhead.report import Report, Result, Sentence, show_verdict, terminal
from fairhead.report.sections import Section
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
from fairhead.report.sections.plain import PlainTable
from fairhead.report.wording import THIN_SPACE, count
from fairhead.stats import Difference

SCHEMA = "fairhead.before_after/1"
_GLYPHS = {"better": "✓", "worse": "!", "changed": "~", "not significant": "?"}
NBSP = "\u00a0"
_SECTIONS = {
    "Stereotypes": (
        "Better and worse are about the distance to an even model. Benchmarks that a model was trained on are scored "
        "on terms, pairs or templates that none was trained on; the others had no part in training."
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


class Collapsed(NamedTuple):
    """A layer whose attention has lost its shape."""

    layer: int  # its number
    before: float  # its mean entropy before
    after: float  # and after
    what: str  # what has become of it, in words


@dataclass(frozen=True)
class Run:
    """What one model did against the first."""

    name: str  # of its folder
    model: str  # path of the model
    method: str | None  # how it came about, where its folder says so
    targeted: tuple[str, ...]  # axes of bias that it was trained on
    headlines: tuple[Difference, ...]  # one figure or more of each benchmark, corrected over all of them and all runs
    # Figures of categories, corrected over all of them and all runs: the spill-over matrix
    by_category: tuple[Difference, ...]
    seen: tuple[Difference, ...]  # figures on terms that were trained on. They say nothing about other terms.
    # Mean attention entropy of each head after, [layers][heads]; None where it was not measured
    entropy: list[list[float]] | None
    collapsed: tuple[Collapsed, ...]  # layers whose attention has lost its shape
    missing: tuple[str, ...]  # benchmarks that only one of the two has
    unpaired: Mapping[str, int]  # benchmark -> items that only one of the two has; they take no part


@dataclass(frozen=True)
class BeforeAfter(Result):
    """One model and what became of it."""

    base: str  # name of the first run
    base_model: str  # path of its model
    base_entropy: list[list[float]] | None  # mean attention entropy of each head, [layers][heads]
    runs: tuple[Run, ...]  # the others
    # Terms (of pairs: sentences) that one of the models was trained on; no figure but `seen` has them
    left_out_targets: tuple[str, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict)  # version, options, and what each run was made with

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; every change has its outcome in words."""
        content = {"schema": SCHEMA, **asdict(self)}
        for run, made in zip(self.runs, content["runs"], strict=True):
            made["collapsed"] = [c._asdict() for c in run.collapsed]
            for key in ("headlines", "by_category", "seen"):
                for one, line in zip(getattr(run, key), made[key], strict=True):
                    line |= {"before": line.pop("a"), "after": line.pop("b")}
                    line |= {"outcome": one.outcome, "axis": benchmark_named(one.benchmark).axis(one.group_by)}
                    line["targeted"] = line["axis"] in run.targeted
        return content

    def rows(self) -> list[dict[str, Any]]:
        """One row per run and headline figure, with its outcome."""
        hidden = ("a", "b", "detail")
        return [
            {"run": run.name, "before": one.a, "after": one.b, "outcome": one.outcome}
            | {key: value for key, value in asdict(one).items() if key not in hidden}
            for run in self.runs
            for one in run.headlines
        ]

    def page(self, command: str | None = None) -> Report:
        """The report: verdict, headlines, spill-over, attention."""
        runs = ", ".join(run.name for run in self.runs)
        sections: list[Section] = []
        level = self.provenance.get("level", 0.95)
        for heading, text in _SECTIONS.items():
            of_runs = [
                [told for c in run.headlines if (told := Told.of(c, self)).section == heading] for run in self.runs
            ]
            panels = _panels(self, of_runs)
            if panels:
                labels = {f"{t.benchmark.title} {t.label.name}": t.label.says for of_run in of_runs for t in of_run}
                said = {name: says for name, says in labels.items() if says}
                about = {"title": heading, "text": text, "base": self.base, "level": level}
                sections.append(Changes(**about, panels=panels, definitions=said))
                if heading == "Attention":
                    sections += _entropy_maps(self)
        matrix = spillover(self)
        if matrix.rows:
            sections.insert(min(1, len(sections)), matrix)
        seen = _panels(self, [[Told.of(c, self) for c in run.seen] for run in self.runs])
        if seen:
            text = (
                "On the terms, pairs or templates that were trained on. This shows that training took hold; it says "
                "nothing about others, and no p-value here is corrected."
            )
            sections.append(
                Changes(title="On the terms trained on", text=text, base=self.base, level=level, panels=seen)
            )
        origin = {"fairhead": __version__, "python": platform.python_version(), "command": command}
        return Report(
            title=f"Before and after: {self.base} and {runs}",
            question=f"What did {runs} change against {self.base}: stereotypes that were aimed at, categories that "
            "were not, the model's language, and its attention? Every figure is paired: both models answered the same "
            "items.",
            verdict=verdict(self),
            sections=sections,
            provenance={k: v for k, v in {**origin, **self.provenance}.items() if v is not None},
        )

    def show(self, console: Console | None = None) -> None:
        """Print the verdict, and the headlines of every run in a table."""
        console = console or terminal()
        show_verdict(console, verdict(self))
        for run in self.runs:
            headlines = [Told.of(change) for change in run.headlines]
            rows = [
                (f"{_GLYPHS[t.change.outcome]} {t.name}", f"{w.before} → {w.after}", t.moved, w.detectable)
                for t in headlines
                if t.change.undefined is None and (w := t.written)
            ]
            columns = ("", "before → after", "change (interval)", "would be seen")
            console.print()
            PlainTable(caption=f"{run.name} against {self.base}", columns=columns, rows=rows).show(console)
            dim = [f"–: {t.name}: {t.change.undefined}" for t in headlines if t.change.undefined is not None]
            for line in [*dim, *([f"Only one of the two has {', '.join(run.missing)}"] if run.missing else [])]:
                console.print(line, style="dim", markup=False, highlight=False)
        family = sum(change.p is not None for run in self.runs for change in run.headlines)
        titles = ", ".join(benchmark_named(name).title for name in _held_out(self))
        held_out = f"{titles} without {len(self.left_out_targets)} terms that were trained on. " if titles else ""
        for line in (
            "✓ better, ! worse, ~ changed but neither, ? not significant",
            f"Interval and what would be seen are of a figure alone; ✓, ! and ~ also need p < 0.05 among all {family}.",
            f"{held_out}p-values and the spill-over matrix: --html, --json, --markdown",
        ):
            console.print(line, style="dim", markup=False, highlight=False)


class Told(NamedTuple):
    """A change, in the words of its benchmark."""

    change: Difference
    benchmark: Benchmark
    label: Label
    where: str  # the benchmark, and which of its items

    @classmethod
    def of(cls, change: Difference, found: BeforeAfter | None = None) -> "Told":
        """With the comparison that it is of, also which terms, pairs or templates it is about."""
        benchmark = benchmark_named(change.benchmark)
        items = "pairs" if "pairs" in benchmark.kinds else "templates" if "questions" in benchmark.kinds else "terms"
        held_out = found is not None and change.benchmark in _held_out(found)
        where = f"{benchmark.title} (held-out {items})" if held_out else benchmark.title
        return cls(change, benchmark, benchmark.label(change.metric), where)

    @property
    def name(self) -> str:
        """Benchmark, category and metric."""
        return " ".join(filter(None, (self.where, self.change.group_by, self.label.name)))

    @property
    def section(self) -> str:
        """Of the report, where it stands."""
        return self.benchmark.section_of(self.change.metric)

    @property
    def unit(self) -> str:
        """What it is counted in."""
        return "ratio" if self.change.relative else "share" if self.label.share else "number"

    @property
    def written(self) -> WrittenChange:
        """Its figures as texts."""
        return Change.of(self.change, self.unit).written()

    @property
    def moved(self) -> str:
        """How far it moved, with the interval."""
        return f"{self.written.difference} ({self.written.interval})"

    def __str__(self) -> str:
        made = self.written
        return f"{self.name} {made.before} → {made.after} ({made.difference}, {made.interval})"


def verdict(found: BeforeAfter) -> list[Sentence]:
    """What the figures allow one to say, a few sentences per run."""
    lines: list[Sentence] = []
    for run in found.runs:
        judged = [told for c in run.headlines if (told := Told.of(c, found)).section != "Attention"]
        by_outcome = {w: [t for t in judged if t.change.outcome == w] for w in ("better", "worse", "changed")}
        for word, tone in (("better", "good"), ("worse", "bad"), ("changed", "note")):
            if by_outcome[word]:
                moved = "has changed significantly, but its distance from even has not,"
                so = moved if word == "changed" else f"is {word}"
                lines.append(Sentence(f"{run.name} {so} in {'; '.join(map(str, by_outcome[word]))}.", tone))
        apart = sum(t.change.outcome == "not significant" for t in judged)
        if apart:
            many, any_of = ("figure", "the") if apart == 1 else (f"{apart} figures", "any of")
            which = f"in {'the other' if any(by_outcome.values()) else any_of} {many}"
            lines.append(Sentence(f"{run.name} does not differ significantly from {found.base} {which}.", "unclear"))
        lines += _categories(run) + _attention(run)
        if run.unpaired:
            named_ones = ", ".join(f"{benchmark_named(name).title} {count(n)}" for name, n in run.unpaired.items())
            lines.append(Sentence(f"{run.name}: items that only one run has take no part ({named_ones}).", "note"))
    blind = [c for run in found.runs for c in run.headlines if c.value is not None and c.mde is None and c.note]
    notes = dict.fromkeys(f"{Told.of(c, found).where}: {c.note}." for c in blind)
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
    parts = {True: ", {} that {} aimed at", False: ", spill-over: {} that {} not aimed at"}
    for aimed, words in parts.items() if run.targeted else [(None, ": {}")]:
        chosen = [c for c in run.by_category if c.value is not None and aimed in (None, _targeted(run, c))]
        worse, better = ([str(Told.of(c)) for c in chosen if c.outcome == word] for word in ("worse", "better"))
        if not chosen or (aimed is not False and not worse and not better):
            continue
        listed = [f" ({'; '.join(some)})" if some else "" for some in (worse, better)]
        further = sum(c.direction == "further" for c in chosen)
        many, were = ("category", "was") if len(chosen) == 1 else ("categories", "were")
        text = (
            f"{run.name}{words.format(f'of {len(chosen)} {many}', were)}, {len(worse)} got significantly "
            f"worse{listed[0]} and {len(better)} better{listed[1]}; further from even than before, significant or "
            f"not: {further}."
        )
        lines.append(Sentence(text, "bad" if worse else "note"))
    return lines


def _attention(run: Run) -> list[Sentence]:
    lines = []
    headlines = [Told.of(c) for c in run.headlines]
    entropy = next((t for t in headlines if t.benchmark.by_head is not None and t.change.value is not None), None)
    if run.collapsed:
        layers = "; ".join(f"layer {c.layer}, entropy {c.before:.2f} → {c.after:.2f}, {c.what}" for c in run.collapsed)
        of = f"{len(run.collapsed)} of {len(run.entropy or [])} layers"
        lines.append(Sentence(f"{run.name}: attention has collapsed in {of} ({layers}).", "bad"))
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
            told, more = Told.of(change), {"targeted": _targeted(run, change), "direction": change.direction}
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


def _panels(found: BeforeAfter, of_runs: Sequence[Sequence[Told]]) -> list[ChangePanel]:
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


def _better(told: Told) -> str:
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
