"""`fairhead audit`: from a file of predictions to gaps with intervals."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from fairhead import __version__
from fairhead.cli.common import Output, command_line, write_json
from fairhead.cli.options import options
from fairhead.errors import InputError, check_known
from fairhead.settings import Count, Level, NotNegative, Option, Replicates, Seed

if TYPE_CHECKING:
    from fairhead.records import Records

_MANY = 20  # groups that are numbers; beyond these they are rather measurements

EPILOG = """
**Examples**

Gaps between races and between genders, and in their intersections:

    fairhead audit preds.csv --label y --prediction yhat --group race --group gender --intersections

Scores instead of predictions, and a report to hand on:

    fairhead audit preds.csv --label y --score p --threshold 0.4 --group race --html report.html

A file without preparation: a subset of its rows, ages as groups, a score that is not a probability, and chosen rates:

    fairhead audit compas-scores-two-years.csv --label two_year_recid --score 'decile_score#1' --threshold 5 \
        --group race --group age --bins age=25,45 --where "days_b_screening_arrest between -30 and 30" \
        --reference Caucasian --rate FPR --rate FNR

Does the new model have smaller gaps than the old one? Two files joined on id, or two columns of one file:

    fairhead audit old.csv --label y --prediction yhat --group race --id id --compare new.csv

    fairhead audit preds.csv --label y --prediction old --compare-prediction new --group race

Has the gap changed since last month? Two files of different rows:

    fairhead audit march.csv --label y --prediction yhat --group race --compare april.csv --unpaired

A table that fairhead wrote, whose columns it knows, with the groups that `fairhead discover` found:

    fairhead audit run/records.csv --groups-from found/groups.csv

**How to read the output**

Each gap has an interval, its number of rows (n), and the minimum detectable effect (MDE): the smallest gap between the
named groups that a sample of this size detects in four of five cases, were it the only figure. "Larger than 0" means
that the interval excludes 0. "Taken alone" means that the gap is not significant after correction over all figures of
the verdict. "Not significant" does not prove that there is no gap: look at the MDE. "Undefined" means too few rows.

The terminal shows percentages, JSON has fractions. Exit code 2: the input is invalid, and one line says why.
"""


@dataclass(frozen=True)
class Columns:
    """The columns of the table.

    Attributes:
        label: true classes. Repeat it, with as many --prediction, if a row can have several labels. Leave it out for a
            table that fairhead wrote, such as records.csv, whose columns it knows.
        target: true numbers, instead of --label; --prediction then names the column of predicted numbers.
        group: group column; repeat it for several. With --groups-from, the default is all columns of that file; for a
            table that fairhead wrote, all its groups.
        prediction: predicted classes.
        score: score of the positive class, which must be a probability unless --threshold is given; or one column for
            each class, in sorted order.
        cluster: column of documents, persons, ... whose rows belong together.
        weight: sampling weights.
        positive: the positive class. The default is the class whose name says so (yes, true, 1, ...), else the last in
            sorted order. With more than two classes: this class against the rest.
        classes: a class; repeat it for each, if the labels do not include all classes.
        threshold: without --prediction, scores of at least this value are positive (default 0.5); scores then need not
            be probabilities. "median": scores above the median are positive.
        where: use only rows that meet this condition, such as "age >= 18 and race in (White, Black)"; also !=, between,
            or, not, parentheses, is missing.
        bins: edges that turn a numeric --group column into groups, such as age=25,45.
        reference: the group to compare others with, such as White, or race=White; the default is the largest.
        encoding: encoding of a text file (default utf-8); files from Windows are often cp1252.
        decimal: decimal separator of CSV and TSV files, a point or a comma.
        drop_missing: drop rows with blank or NaN values; a row without a group is left out only of figures by that
            column.
        groups_from: CSV file with more group columns, such as the groups.csv of `fairhead discover`, joined on --id.
    """

    panel: ClassVar[str] = "The table"
    label: Annotated[tuple[str, ...], Option(metavar="COLUMN")] = ()
    target: Annotated[str | None, Option(metavar="COLUMN")] = None
    group: Annotated[tuple[str, ...], Option(metavar="COLUMN")] = ()
    prediction: Annotated[tuple[str, ...], Option(metavar="COLUMN", also="--pred")] = ()
    score: Annotated[tuple[str, ...], Option(metavar="COLUMN")] = ()
    cluster: Annotated[str | None, Option(metavar="COLUMN")] = None
    weight: Annotated[str | None, Option(metavar="COLUMN")] = None
    positive: Annotated[str | None, Option(metavar="CLASS")] = None
    classes: Annotated[tuple[str, ...], Option("--class", metavar="CLASS")] = ()
    threshold: Annotated[str | None, Option(metavar="SCORE|median")] = None
    where: Annotated[str | None, Option(metavar="CONDITION")] = None
    bins: Annotated[tuple[str, ...], Option(metavar="COLUMN=EDGES")] = ()
    reference: Annotated[tuple[str, ...], Option(metavar="GROUP")] = ()
    encoding: Annotated[str | None, Option(metavar="NAME")] = None
    decimal: Annotated[str | None, Option(metavar="SIGN")] = None
    drop_missing: bool = False
    groups_from: Annotated[str | None, Option(metavar="FILE")] = None

    def check(self, comparing: "Comparing") -> None:
        """Refuse columns that are named in part, or twice: a gap between groups that are the label means nothing."""
        if self.label and self.target is not None:
            raise InputError("--label (true classes) and --target (true numbers) cannot be combined; give one of them")
        named = {*self.prediction, *self.score, self.cluster, self.weight, comparing.id}
        if not self.label and self.target is None and named - {"cluster", "weight", "id", None}:
            raise InputError("Missing option '--label'; name a column of true classes, or --target for true numbers")
        if (self.label or self.target is not None) and not self.group and self.groups_from is None:
            raise InputError("Missing option '--group'; name a group column, or give --groups-from FILE")
        if len(self.prediction) > max(1, len(self.label)):
            raise InputError(f"--prediction names {', '.join(self.prediction)}; expected one, or one for each --label")
        parts: dict[str, Iterable[str | None]] = {
            "--label": self.label,
            "--target": [self.target],
            "--prediction": self.prediction,
            "--score": self.score,
            "--group": dict.fromkeys(self.group),
            "--compare-prediction": [comparing.compare_prediction],
        }
        seen: dict[str, str] = {}
        for option, column in ((option, column) for option, names in parts.items() for column in names if column):
            if column in seen:
                raise InputError(f"column {column!r} is given as {seen[column]} and as {option}; give it once")
            seen[column] = option
        if comparing.compare_prediction is None:
            return
        if self.target is not None or len(self.label) > 1:
            raise InputError(
                "--compare-prediction needs one --label; put the other predictions in a file for --compare"
            )
        if len(self.prediction) != 1:
            raise InputError("--compare-prediction needs --prediction, the column to compare it with")

    def read(self, path: str, comparing: "Comparing") -> "Sequence[Records]":
        """The records of a file, and those that they are compared with."""
        from fairhead.audit.audited_rows import read_both, read_rows
        from fairhead.records.columns import tidy_levels  # classes are read as those of a text file
        from fairhead.records.layout import GroupFile

        joined = None if self.groups_from is None else GroupFile.read(self.groups_from)
        further = () if joined is None else joined.columns
        several, second = len(self.label) > 1, comparing.compare_prediction
        as_given = ("target", "cluster", "weight", "drop_missing", "where", "encoding", "decimal")
        columns: dict[str, Any] = {name: getattr(self, name) for name in as_given} | {
            "label": list(self.label) if several else (*self.label, "label")[0],
            "prediction": list(self.prediction) if several else (*self.prediction, None)[0],
            "score": self.score or None,
            "groups": [name for name in self.group if name not in further and (self.label or self.target)],
            "id": "id" if comparing.id is None and joined is not None else comparing.id,
            "classes": tidy_levels(list(self.classes), text_only=True) or None,
            "threshold": _threshold(self.threshold),
            "bins": _edges(self.bins),
        }
        positive = None if self.positive is None else tidy_levels([self.positive], text_only=True)[0]
        if second is not None:
            columns["prediction"] = (columns["prediction"], second)
        if second is None and comparing.compare is None:
            found = [read_rows(path, positive, columns)[0]]
        else:
            found = [*read_both(path, comparing.compare, positive, columns)[:2]]
        for i, one in enumerate(found):
            groups = {**one.groups, **({} if joined is None else joined.of(one.id))}
            wanted = self.group or further or tuple(groups)
            for name in self.group:
                check_known(name, groups, f"{path} has no column {name!r} of groups; there are")
            found[i] = replace(one, groups={name: column for name, column in groups.items() if name in wanted})
        return found


@dataclass(frozen=True)
class Statistics:
    """What is computed.

    Attributes:
        intersections: also audit combinations of the groups.
        metric: a metric; repeat it for several: DP, EOp, EOd, impact_ratio, accuracy, worst_group_accuracy, ...
            ("all" computes and explains every metric).
        metrics_from: file with your own metrics, one per line, from tp, fp, fn, tn and n: cost = (5 * fn + fp) / n.
            They are shown with the others.
        slices: a rate, such as accuracy or FNR; shows the worst intersections of groups, selected on one half of the
            rows and confirmed on the other.
        multiclass: how to combine the gaps of several classes: the largest, the mean, or weighted by class frequency.
        n_boot: bootstrap replicates.
        seed: same seed, same figures.
        level: confidence level of intervals.
        min_cell: minimum number of rows (or clusters) for a rate; below that, it is undefined.
        min_group: minimum size of a group to be included in gaps, in rows, or below 1 as a share of all rows.
    """

    panel: ClassVar[str] = "Statistics"
    intersections: bool = False
    metric: Annotated[tuple[str, ...], Option(metavar="NAME")] = ()
    metrics_from: Annotated[str | None, Option(metavar="FILE")] = None
    slices: Annotated[str | None, Option(metavar="RATE")] = None
    multiclass: Literal["max", "mean", "weighted"] = "max"
    n_boot: Annotated[Replicates, Option(metavar="N")] = 2000
    seed: Annotated[Seed, Option(metavar="N")] = 0
    level: Annotated[Level, Option(metavar="SHARE")] = 0.95
    min_cell: Annotated[Count, Option(metavar="N")] = 10
    min_group: Annotated[NotNegative, Option(metavar="N|SHARE")] = 0

    def arguments(self) -> dict[str, Any]:
        """The arguments of `fairhead.audit`."""
        given = dict(vars(self))
        names, file, _ = given.pop("metric"), given.pop("metrics_from"), given.pop("slices")
        metrics: Sequence[Any] | None = names or None
        if file is not None:
            from fairhead.audit.catalogue import read_metrics

            own = {metric.name: metric for metric in read_metrics(file)}
            # Its metrics may be named, too, and stand last then as well.
            metrics = [*(name for name in names or [None] if name not in own), *own.values()]
        return {**given, "metrics": metrics}


@dataclass(frozen=True)
class Comparing:
    """Comparison of two sets of predictions.

    Attributes:
        compare: a second file with the same columns, joined on --id, or row by row without it.
        compare_prediction: a second prediction column in the same file.
        unpaired: --compare has different rows, such as another month; shows the drift of gaps and rates.
        id: column of unique values to join two files on (--groups-from: by default id).
        correction: correction of p-values over all differences: Westfall-Young, Holm or Benjamini-Hochberg.
    """

    panel: ClassVar[str] = "Comparison of two sets of predictions"
    compare: Annotated[str | None, Option(metavar="FILE")] = None
    compare_prediction: Annotated[str | None, Option(metavar="COLUMN", also="--compare-pred")] = None
    unpaired: bool = False
    id: Annotated[str | None, Option(metavar="COLUMN")] = None
    correction: Literal["westfall-young", "holm", "bh"] = "westfall-young"


@dataclass(frozen=True)
class Forms(Output):
    """What is written.

    Attributes:
        ll144: write the tables of New York City's Local Law 144 (--intersections of sex and race) to an .html file.
        eu_ai_act: write a fact sheet with the headings of the EU AI Act's Article 10 and Annex IV to an .html file.
        rate: a rate of groups to show, such as FPR or FNR; repeat it for several (the JSON has all rates).
    """

    ll144: Annotated[str | None, Option(metavar="FILE")] = None
    eu_ai_act: Annotated[str | None, Option(metavar="FILE")] = None
    rate: Annotated[tuple[str, ...], Option(metavar="NAME")] = ()


@options("audit")
def audit_command(
    context: typer.Context,
    path: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="CSV, TSV, JSONL (each also .gz, .bz2, .xz) or Parquet; - for CSV on standard input."
        ),
    ],
    columns: Columns,
    statistics: Statistics,
    comparing: Comparing,
    output: Forms,
) -> None:
    """Measure gaps between groups, with intervals, from labels and predictions in a file. Needs no model, no torch."""
    other_file, other_column = comparing.compare, comparing.compare_prediction
    if other_file is not None and other_column is not None:
        raise InputError("--compare and --compare-prediction cannot be combined; give one of them")
    if comparing.unpaired and other_file is None:
        raise InputError("--unpaired compares with the rows of another file; name it with --compare")
    if path == other_file == "-":
        raise InputError("only one of the two files can be standard input; name the other")
    columns.check(comparing)
    output.check(path, other_file, columns.groups_from, pages=(output.ll144, output.eu_ai_act))
    from rich.markup import escape

    from fairhead.audit import audit, compare, drift
    from fairhead.report import show_page, terminal, write
    from fairhead.report.form import one_of
    from fairhead.report.legal_forms import eu_ai_act, local_law_144

    records, *others = columns.read(path, comparing)
    names = (path, other_file or "") if other_column is None else (columns.prediction[0], other_column)
    made = {"version": __version__, "seed": statistics.seed, "command": command_line(context)}
    chosen: dict[str, Any] = {**statistics.arguments(), "reference": columns.reference}
    compared = None
    if others:
        if comparing.unpaired:
            # Separate samples have no swaps for Westfall and Young.
            compared = drift(records, *others, **chosen, correction="bh" if comparing.correction == "bh" else "holm")
        else:
            compared = compare(records, *others, **chosen, correction=comparing.correction)
        compared = replace(compared, provenance={**made, **compared.provenance})
    found = audit(records, **chosen) if compared is None else compared.a
    found = replace(found, provenance={**made, **found.provenance})
    sliced = []
    if statistics.slices is not None:
        from fairhead.audit.slices import worst_slices

        worst = worst_slices(records, statistics.slices, **{k: chosen[k] for k in ("seed", "n_boot", "level")})
        sliced = [worst.section()]
    for name in output.rate:
        one_of(name, list(found.by_group[0].rates), "--rate")
    if output.json is not None:
        content = found.to_dict() | ({"slices": worst.to_dict()["slices"]} if sliced else {})
        write_json(content if compared is None else {**content, "comparison": compared.to_dict()}, output.json)
    alone = found.page(path, output.rate)
    page = alone if compared is None else compared.page(names)
    page = replace(page, sections=[*page.sections, *sliced])
    page = replace(page, title=f"Audit of {Path(path).name}", provenance=found.provenance)
    pages = (output.html, lambda _: page), (output.ll144, local_law_144), (output.eu_ai_act, eu_ai_act)
    for file, form in pages:
        if file is not None:
            write(form(found), file)
    if output.json != "-":
        console = terminal()
        console.print(f"[bold]{escape(_what(records, path, found.provenance['audit']['n']))}[/]", highlight=False)
        for name, column in records.groups.items():
            if len(column.levels) > _MANY and not isinstance(column.levels[0], str):
                hint = f"{name} has {len(column.levels)} numeric groups: combine them with --bins {name}=25,45."
                console.print(escape(hint), highlight=False)
        if compared is not None:
            compared.show(console, names)
            console.print(f"\n[bold]{escape(f'Audit of A, {names[0]}')}[/]", highlight=False)
        show_page(alone, console)
        for section in sliced:
            console.print()
            section.show(console)


def _threshold(given: str | None) -> float | str | None:
    """A number, or "median"."""
    try:
        return given if given is None or given == "median" else float(given)
    except ValueError:
        raise InputError(f"--threshold is {given!r}; expected a score or the word median") from None


def _edges(given: Sequence[str]) -> dict[str, list[float]]:
    """The edges of `--bins age=25,45`, by column."""
    found = {}
    for text in given:
        column, _, edges = text.rpartition("=")
        if column in found:
            raise InputError(f"--bins names {column} twice; give all edges at once, such as {column}=25,45")
        try:
            found[column] = [float(edge) for edge in edges.split(",")]
        except ValueError:
            column = ""
        if not column or not all(math.isfinite(edge) for edge in found[column]):
            raise InputError(f"--bins is {text!r}; expected a column and the edges of its groups: age=25,45")
    return found


def _what(records: "Records", path: str, n_joined: int) -> str:
    """One line on what was read, and how many of the rows are in both files of a comparison."""
    origin = records.provenance
    less = {"left out by --where": "rows_left_out", "with missing values dropped": "rows_dropped"}
    without = ", ".join(f"{origin[key]:,} {why}" for why, key in less.items() if origin.get(key))
    rows = f"{len(records):,} rows" + (f" ({without})" if without else "")
    if n_joined < len(records):
        rows = f"the {n_joined:,} rows that are in both files, of {rows}"
    classes = f"{len(records.classes)} classes"
    if records.numbers is not None:
        classes = "predicted numbers"
    elif records.labels:
        classes = f"{len(records.labels)} labels"
    elif len(records.classes) == 2:
        classes = f"positive class {records.classes[-1]!r}"
    groups = ", ".join(f"{name} ({len(column.levels)})" for name, column in records.groups.items())
    return f"{path}: {rows}, {classes}, groups by {groups}"
