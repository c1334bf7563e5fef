"""`fairhead audit`: from a file of predictions to gaps with intervals."""

import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairhead import __version__
from fairhead.cli.output import check_output, command_line, terminal, write_json
from fairhead.errors import InputError

if TYPE_CHECKING:
    from fairhead.audit import Audit, Comparison
    from fairhead.records import Records


class Multiclass(enum.StrEnum):
    """How one-vs-rest gaps of several classes become one."""

    max = "max"
    mean = "mean"
    weighted = "weighted"


class Correction(enum.StrEnum):
    """How p-values are corrected over all differences of a comparison."""

    holm = "holm"
    bh = "bh"


_TABLE = "The table"
_COMPARISON = "Comparison of two sets of predictions"
_STATISTICS = "Statistics"
_OUTPUT = "Output"

EPILOG = """
**Examples**

Gaps between races and between genders, and in their intersections:

    fairhead audit preds.csv --label y --pred yhat --group race --group gender --intersections

Scores instead of predictions, and a report to hand on:

    fairhead audit preds.csv --label y --score p --threshold 0.4 --group race --html report.html

Is the new model more even than the old one? Two files joined on id, or two columns of one file:

    fairhead audit old.csv --label y --pred yhat --group race --id id --compare new.csv

    fairhead audit preds.csv --label y --pred old --compare-pred new --group race

**How to read the output**

Each gap stands with its interval, with the number of rows that it rests on (n), and with the minimum detectable
effect (MDE): the smallest gap that a sample of this size would show in four of five cases. "Larger than 0" means that
the interval leaves 0 out. "Not significant" is no proof of evenness: look at the MDE. "Undefined" means that a
group has too few rows.

Percent in the terminal, fractions in JSON. Exit code 2: the input is not what was expected, and one line says why.
"""


def _option(flag: str, help: str, panel: str, metavar: str | None = None) -> Any:
    """An option in a panel of the help; its environment variable is named by the rule in the help of `fairhead`."""
    variable = f"FAIRHEAD_AUDIT_{flag.strip('-').replace('-', '_').upper()}"
    return typer.Option(flag, help=help, rich_help_panel=panel, metavar=metavar, envvar=variable, show_envvar=False)


def audit_command(
    context: typer.Context,
    path: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="CSV, TSV, JSONL (each also .gz, .bz2, .xz) or Parquet; - for CSV on standard input."
        ),
    ],
    label: Annotated[str, _option("--label", "True classes.", _TABLE, "COLUMN")],
    group: Annotated[list[str], _option("--group", "Groups; give it several times.", _TABLE, "COLUMN")],
    pred: Annotated[str | None, _option("--pred", "Predicted classes.", _TABLE, "COLUMN")] = None,
    score: Annotated[
        list[str] | None,
        _option(
            "--score",
            "Probability of the positive class, in [0, 1]; or one column for each class, in sorted order.",
            _TABLE,
            "COLUMN",
        ),
    ] = None,
    cluster: Annotated[
        str | None, _option("--cluster", "Documents, persons, ... whose rows belong together.", _TABLE, "COLUMN")
    ] = None,
    weight: Annotated[str | None, _option("--weight", "Sampling weights.", _TABLE, "COLUMN")] = None,
    positive: Annotated[
        str | None,
        _option(
            "--positive",
            "The positive class, by default the last of two in sorted order; of more than two, that class against "
            "the rest.",
            _TABLE,
            "CLASS",
        ),
    ] = None,
    classes: Annotated[
        list[str] | None,
        _option("--class", "A class, once for each, where the labels do not show them all.", _TABLE, "CLASS"),
    ] = None,
    threshold: Annotated[
        float, _option("--threshold", "Without --pred: positive from this score on.", _TABLE, "SCORE")
    ] = 0.5,
    drop_missing: Annotated[
        bool, _option("--drop-missing", "Go on without rows that have blank or NaN values.", _TABLE)
    ] = False,
    intersections: Annotated[
        bool, _option("--intersections", "Also audit combinations of the groups.", _STATISTICS)
    ] = False,
    metric: Annotated[
        list[str] | None,
        _option(
            "--metric",
            "A metric, several times if need be: DP, EOp, EOd, impact_ratio, accuracy, worst_group_accuracy, ... "
            '("all" computes and explains each of them).',
            _STATISTICS,
            "NAME",
        ),
    ] = None,
    multiclass: Annotated[
        Multiclass,
        _option(
            "--multiclass",
            "How the gaps of several classes become one: the largest, the mean, or weighted by class frequency.",
            _STATISTICS,
        ),
    ] = Multiclass.max,
    n_boot: Annotated[int, _option("--n-boot", "Bootstrap replicates.", _STATISTICS, "N")] = 2000,
    seed: Annotated[int, _option("--seed", "Same seed, same figures.", _STATISTICS, "N")] = 0,
    level: Annotated[float, _option("--level", "Confidence level of intervals.", _STATISTICS, "SHARE")] = 0.95,
    min_cell: Annotated[
        int, _option("--min-cell", "Rows (or clusters) that a rate needs to be defined.", _STATISTICS, "N")
    ] = 10,
    compare: Annotated[
        str | None,
        _option(
            "--compare", "A second file with the same columns; joined on --id, else row by row.", _COMPARISON, "FILE"
        ),
    ] = None,
    compare_pred: Annotated[
        str | None,
        _option("--compare-pred", "A second column of predictions in the same file.", _COMPARISON, "COLUMN"),
    ] = None,
    id: Annotated[str | None, _option("--id", "Distinct values to join two files on.", _COMPARISON, "COLUMN")] = None,
    correction: Annotated[
        Correction,
        _option("--correction", "Of p-values, over all differences: Holm or Benjamini-Hochberg.", _COMPARISON),
    ] = Correction.holm,
    json_path: Annotated[str | None, _option("--json", "Write JSON; - prints only JSON.", _OUTPUT, "FILE")] = None,
    html_path: Annotated[
        str | None, _option("--html", "Write a self-contained report, and its JSON beside it.", _OUTPUT, "FILE")
    ] = None,
) -> None:
    """Gaps between groups, with intervals, from a file of labels and predictions. Needs no model and no torch."""
    if compare is not None and compare_pred is not None:
        raise InputError("--compare and --compare-pred exclude each other; give one of them")
    if path == compare == "-":
        raise InputError("standard input can be one of the two files only; name the other")
    _check_parts(label, pred, score or [], group, compare_pred)
    for output in (json_path, html_path):
        check_output(output)
    if json_path and html_path and Path(json_path).absolute() == Path(html_path).absolute().with_suffix(".json"):
        raise InputError(f"--html {html_path} writes its own JSON to {json_path}; give --json another name")
    columns: dict[str, Any] = {
        "label": label,
        "prediction": pred,
        "score": score,
        "id": id,
        "cluster": cluster,
        "weight": weight,
        "classes": None if not classes else _typed(classes),
        "positive": None if positive is None else _typed([positive])[0],
        "threshold": threshold,
        "drop_missing": drop_missing,
    }
    options: dict[str, Any] = {
        "intersections": intersections,
        "metrics": _metrics(metric),
        "n_boot": n_boot,
        "seed": seed,
        "level": level,
        "min_cell": min_cell,
        "multiclass": multiclass.value,
    }
    made = {"version": __version__, "seed": seed, "command": command_line(context)}
    records, other = _read(path, group, columns, compare, compare_pred)
    audit, comparison = _run(records, other, options, correction.value, made)
    names = (pred or path, compare_pred) if compare_pred is not None else (path, compare or "")
    if json_path is not None:
        write_json(_to_json(audit, comparison), json_path)
    if html_path is not None:
        from fairhead.report import write

        write(_report(audit, comparison, path, names, group, level), html_path)
    if json_path != "-":
        _show(audit, comparison, records, path, names, level)


def _check_parts(label: str, pred: str | None, score: Sequence[str], group: Sequence[str], other: str | None) -> None:
    """A column has one part to play: a gap between groups that are the label, say, means nothing."""
    parts = [("--label", label), ("--pred", pred), *(("--score", s) for s in score)]
    parts += [("--group", name) for name in dict.fromkeys(group)] + [("--compare-pred", other)]
    seen: dict[str, str] = {}
    for option, column in parts:
        if column is None:
            continue
        if column in seen:
            raise InputError(f"column {column!r} is given as {seen[column]} and as {option}; one of them is expected")
        seen[column] = option
    if other is not None and pred is None:
        raise InputError("--compare-pred needs --pred, the column that it is compared with")


def _typed(values: Sequence[str]) -> list[Any]:
    """Classes on the command line, read as a text file would be."""
    from fairhead.records.columns import tidy_levels

    return tidy_levels(list(values), text_only=True)


def _metrics(names: Sequence[str] | None) -> Sequence[str] | str | None:
    return "all" if names and "all" in names else names or None


def _read(
    path: str, groups: Sequence[str], columns: Mapping[str, Any], compare: str | None, compare_pred: str | None
) -> "tuple[Records, Records | None]":
    """The records and those to compare them with."""
    from fairhead.records import Records

    if compare_pred is None:
        records = Records.read(path, groups=groups, **columns)
        return records, None if compare is None else Records.read(compare, groups=groups, **columns)
    # Read as one more categorical column, so that the two stay row by row even where rows are dropped.
    both = Records.read(path, groups=[*groups, compare_pred], **columns)
    return both.split_prediction(compare_pred)


def _run(
    records: "Records", other: "Records | None", options: Mapping[str, Any], correction: str, made: Mapping[str, Any]
) -> "tuple[Audit, Comparison | None]":
    from dataclasses import replace

    from fairhead.audit import audit, compare

    if other is None:
        found = audit(records, **options)
        return replace(found, provenance={**made, **found.provenance}), None
    comparison = compare(records, other, **{**options, "correction": correction})
    comparison = replace(comparison, provenance={**made, **comparison.provenance})
    return replace(comparison.a, provenance={**made, **comparison.a.provenance}), comparison


def _to_json(audit: "Audit", comparison: "Comparison | None") -> dict[str, Any]:
    return audit.to_dict() if comparison is None else {**audit.to_dict(), "comparison": comparison.to_dict()}


def _report(
    audit: "Audit",
    comparison: "Comparison | None",
    path: str,
    names: tuple[str, str],
    groups: Sequence[str],
    level: float,
) -> dict[str, Any]:
    """The input of the HTML report."""
    from fairhead.cli.verdicts import audit_verdicts, comparison_verdicts

    by = " and ".join(groups)
    question = f"Are the predictions in {path} even by {by}?"
    verdicts = audit_verdicts(audit, level)
    sections: list[dict[str, Any]] = [
        {"kind": "audit", "title": f"Audit of {names[0]}", "name": names[0], "audit": audit.to_dict()}
    ]
    if comparison is not None:
        question = f"Are the predictions {names[1]} (B) more even by {by} than {names[0]} (A)?"
        both = (f"A, {names[0]}", verdicts), (f"B, {names[1]}", audit_verdicts(comparison.b, level))
        alone = [verdict._replace(text=f"{name}: {verdict.text}") for name, found in both for verdict in found]
        verdicts = comparison_verdicts(comparison) + alone
        sections.append(
            {
                "kind": "audit",
                "title": f"Audit of {names[1]}",
                "name": names[1],
                "audit": comparison.b.to_dict(),
            }
        )
        sections.insert(
            0,
            {
                "kind": "comparison",
                "title": f"{names[1]} against {names[0]}",
                "comparison": comparison.to_dict(),
                "a_name": names[0],
                "b_name": names[1],
            },
        )
    return {
        "schema": "fairhead.report/1",
        "title": f"Audit of {Path(path).name}",
        "question": question,
        "verdict": [verdict._asdict() for verdict in verdicts],
        "sections": sections,
        "provenance": dict(audit.provenance),
    }


def _show(
    audit: "Audit",
    comparison: "Comparison | None",
    records: "Records",
    path: str,
    names: tuple[str, str],
    level: float,
) -> None:
    from fairhead.cli.tables import show_audit, show_comparison
    from fairhead.cli.verdicts import audit_verdicts, comparison_verdicts

    console = terminal()
    rows = audit.provenance["audit"]["n"]
    show_audit(console, audit, audit_verdicts(audit, level), _what(records, path, rows), level)
    if comparison is not None:
        show_comparison(console, comparison, comparison_verdicts(comparison), names, level)


def _what(records: "Records", path: str, n_joined: int) -> str:
    """One line on what was read, and how many of the rows are in both files of a comparison."""
    dropped = records.provenance.get("rows_dropped", 0)
    rows = f"{len(records):,} rows" + (f" ({dropped:,} with missing values dropped)" if dropped else "")
    if n_joined < len(records):
        rows = f"the {n_joined:,} rows that are in both files, of {rows}"
    if len(records.classes) == 2:
        classes = f"positive class {records.classes[-1]!r}"
    else:
        classes = f"{len(records.classes)} classes"
    groups = ", ".join(f"{name} ({len(column.levels)})" for name, column in records.groups.items())
    return f"{path}: {rows}, {classes}, groups by {groups}"
