"""The table of a grid: its lines, what it says in words, and how it is written. Imports no torch.

The words say which methods differ significantly from the baseline, and what difference would have been missed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fairhead.mitigate import LADDER
from fairhead.report import Report, Sentence, render
from fairhead.report.form import build_dataclass, plain
from fairhead.report.sections import Section
from fairhead.report.sections.bench_block import BenchBlock, Choice, MethodFigures, column_name
from fairhead.report.sections.plain import PlainTable, PlainTables, Text, markdown_table
from fairhead.report.wording import in_short, plain_value, signed
from fairhead.stats import p_text
from fairhead.store import write_json, write_text

TABLE_SCHEMA = "fairhead.bench.table/1"
_GAPS = ("EOd", "EOp", "DP")  # the verdict is about the first of these that has a value


@dataclass(frozen=True)
class Table:
    """The results of a grid."""

    title: str
    about: str
    baseline: str
    metrics: tuple[str, ...]
    blocks: tuple[BenchBlock, ...]
    reported: Mapping[str, Any]
    provenance: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; values are fractions."""
        return {"schema": TABLE_SCHEMA, **vars(self), "blocks": [_content(block) for block in self.blocks]}


def _content(block: BenchBlock) -> dict[str, Any]:
    """A block as table.json has it."""
    found = {name: getattr(block, name) for name in ("data", "backbone", "group", "n", "verdict", "findings")}
    methods = [
        {**vars(m), "cost": m.cost and asdict(m.cost), "search": m.search and asdict(m.search)} for m in block.methods
    ]
    return plain({**found, "methods": methods, "frontier": block.frontier and asdict(block.frontier)}, "block")


def _p(line: MethodFigures, metric: str) -> float | None:
    """The corrected p of its difference from the baseline; None where it was not compared."""
    return line.differences[metric].p_adjusted if metric in line.differences else None


def _differs(line: MethodFigures, metric: str) -> bool:
    """Whether that difference is significant."""
    return metric in line.differences and line.differences[metric].significant


def _points(line: MethodFigures, metric: str) -> str:
    """That difference, in points."""
    return signed(100 * (line.differences[metric].value or 0.0), 1)


def verdict(lines: Sequence[MethodFigures], baseline: str, commonest: float | None = None) -> str:
    """A few sentences on one block: how large the gap is, which methods change it significantly, and at what price.

    `commonest` is the share of the test rows that have the commonest class: the accuracy of an answer without a model.
    """
    base = next((line for line in lines if line.method == baseline and line.figures), None)
    if base is None:
        return f"{baseline} has no result: nothing to compare with."
    gap = next((gap for gap in _GAPS if gap in base.figures and base.figures[gap].mean is not None), None)
    if gap is None:
        return "No gap is defined: too few rows in a group."
    said = [f"With {baseline}, {gap} is {_percent(base, gap)} at an accuracy of {_percent(base, 'accuracy')}."]
    if len(base.seeds) < 2:
        return f"{said[0]} One seed: the variance of training is unknown, so no difference can be tested."
    tested = [line for line in lines if _p(line, gap) is not None]
    if not tested:
        said.append(f"No other method shares two seeds with {baseline} yet: nothing to compare.")
    free = [line for line in tested if not line.uses_groups]
    for outcome, word in (("better", "smaller"), ("worse", "larger")):
        differ = [line for line in free if line.differences[gap].outcome == outcome]
        if differ:
            said.append(f"Significantly {word} {gap}: {_with_price(differ, gap)}.")
    vague = [line for line in free if not _differs(line, gap)]
    if vague:
        who = ", ".join(line.method for line in vague) + (" does not differ" if len(vague) == 1 else " do not differ")
        if vague == free and len(free) > 1:
            who = "No method without groups differs"
        said.append(f"{who} significantly from {baseline} in {gap}; {_missed(vague, gap)}.")
        costly = [f"{line.method} {_points(line, 'accuracy')}" for line in vague if _differs(line, "accuracy")]
        if costly:
            said.append(f"Of these, accuracy differs significantly: {', '.join(costly)} points.")
    references = [line for line in tested if line.uses_groups and not line.circular]
    differ = [line for line in references if _differs(line, gap)]
    how = "trained or chosen" if any("chosen" in line.remark for line in differ or references) else "trained"
    if differ:
        said.append(f"{how.capitalize()} with the groups: {_with_price(differ, gap)}.")
    elif references:
        names = " and ".join(line.method for line in references)
        said.append(
            f"Even {how} with the groups ({names}), {gap} does not differ significantly from that of {baseline}."
        )
    circular = "; ".join(
        f"{line.method} {_points(line, gap)} points against {line.differences[gap].methods[0]} "
        f"({p_text(_p(line, gap))})"
        for line in tested
        if line.circular
    )
    if circular:
        said.append(f"Circular, as the test rows chose the epoch by their EOd, and no result: {circular}.")
    # Small gaps may be those of answers that tell nothing.
    ends = {line.method: line.figures["accuracy"].low for line in lines if "accuracy" in line.figures}
    guess = -1.0 if commonest is None else commonest
    guesses = [name for name, low in ends.items() if low is not None and low <= guess]
    if guesses:
        said.append(
            f"Not shown to be more often right than the commonest class on its own ({100 * guess:.1f} %): "
            f"{', '.join(guesses)}. A small gap is no merit there."
        )
    return " ".join(said)


def _percent(line: MethodFigures, metric: str) -> str:
    figure = line.figures.get(metric)
    return "unknown size" if figure is None or figure.mean is None else f"{100 * figure.mean:.1f} %"


def _with_price(lines: Sequence[MethodFigures], gap: str) -> str:
    """The change of each method's gap, and of its accuracy."""
    said = []
    for line in lines:
        price = f"accuracy: not significant, {p_text(_p(line, 'accuracy'))}"
        if _p(line, "accuracy") is None:
            price = "accuracy not compared"
        elif _differs(line, "accuracy"):
            price = f"accuracy {_points(line, 'accuracy')} points"
        said.append(f"{line.method} {_points(line, gap)} points ({price})")
    return "; ".join(said)


def finding(lines: Sequence[MethodFigures], metric: str, baseline: str) -> str:
    """One sentence: which methods differ significantly from the baseline in this metric, and what would be missed."""
    tested = [line for line in lines if _p(line, metric) is not None]
    figures = [line.figures[metric] for line in lines if metric in line.figures]
    name = metric.replace("worst_group_accuracy", "worst-group accuracy")
    if not tested:
        reasons = [figure.undefined for figure in figures if figure.undefined]
        why = f"undefined ({reasons[0]})" if reasons else f"fewer than two seeds in common with {baseline}"
        return f"{name}: {why}."
    # The worst group may be among the cells that a figure goes without.
    excluded = list(dict.fromkeys(reason for figure in figures for reason in figure.excluded))
    without = f" Left out: {in_short(excluded)}." if excluded else ""
    if all(line.differences[metric].mde is None for line in tested):
        return f"{name}: the same answers as {baseline} everywhere.{without}"
    differ = [line for line in tested if _differs(line, metric)]
    if not differ:
        who = f"{tested[0].method} does not differ" if len(tested) == 1 else f"none of {len(tested)} methods differs"
        return f"{name}: {who} significantly from {baseline}; {_missed(tested, metric)}.{without}"
    said = []
    for line in differ:
        remark = f" ({line.remark})" if line.remark and line.remark not in line.method else ""
        other = line.differences[metric].methods[0]
        held = f" against {other}" if other not in ("", baseline) else ""
        said.append(f"{line.method} {_points(line, metric)} points{remark}{held}")
    rest = [line for line in tested if line not in differ]
    others = f"; for the other {len(rest)} it is not significant, and {_missed(rest, metric)}" if rest else ""
    return f"{name}: {', '.join(said)} against {baseline}{others}.{without}"


def _missed(lines: Sequence[MethodFigures], metric: str) -> str:
    """The smallest difference that would have been found, of each method its own."""
    known = {line.method: 100 * mde for line in lines if (mde := line.differences[metric].mde) is not None}
    if not known:
        return "their answers are the same everywhere"
    if min(known.values()) >= 100:
        return "these seeds and rows are too few to show any difference"
    each = ", ".join(f"{f'{mde:.1f}' if mde < 100 else 'none'} for {name}" for name, mde in known.items())
    return f"the smallest detectable difference in points, each compared alone, is {each}"


def name_of(method: str, choice: Choice) -> str:
    """How what a search chose for a method is called in the table."""
    return f"{method} chosen with groups" if choice.with_groups else method


def mean_of_all(values: Sequence[float | None]) -> float | None:
    """None where one of them is not known, or there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def write_table(table: Table, folder: Path | str) -> Path:
    """Write table.md, table.json and table.html to a folder; return the path of the page."""
    folder = Path(folder)
    page = render(report_of(table))
    write_text(folder / "table.md", markdown(table))
    write_json(folder / "table.json", table.to_dict())
    write_text(folder / "table.html", page)
    return folder / "table.html"


def report_of(table: Table) -> Report:
    """The page of a table: verdicts first, then a section for each block."""
    several = len(table.blocks) > 1
    sections: list[Section] = [*table.blocks]
    sections += [_reported(table)] if table.reported else []
    sections.append(Text(title="How to read this", text="\n\n".join(_notes(table))))
    return Report(
        title=table.title,
        question=table.about,
        verdict=[Sentence(f"{b.title}. {b.verdict}" if several else b.verdict, "note") for b in table.blocks],
        sections=sections,
        provenance=table.provenance,
        brand="bench",
    )


def markdown(table: Table) -> str:
    """The table as Markdown."""
    about = [f"# {table.title}", table.about.strip()]
    parts = ["**In short.**", *(f"- {block.title}. {block.verdict}" for block in table.blocks)]
    for block in table.blocks:
        drawn = build_dataclass(BenchBlock, plain(block, "block"), "block")
        parts += [f"## {block.title}", *drawn.markdown()]
    if table.reported:
        reported = _reported(table)
        parts += [f"## {reported.title}", reported.text]
        for found in reported.tables:
            parts += [found.caption, markdown_table(found.columns, found.rows)]
    parts += ["## How to read this", " ".join(_notes(table)), "## How it was made", *_made(table)]
    text = "\n\n".join(part for part in parts if part) + "\n"
    text = re.sub(r"(?m)^(- .*)\n\n(?=- )", r"\1\n", text)  # bullets that follow each other stay one list
    return "\n\n".join([*(part for part in about if part), text])


def _reported(table: Table) -> PlainTables:
    """What the paper reports, a table for each data set."""
    tables = [
        PlainTable(
            caption=name,
            columns=["method", *(column_name(metric) for metric in next(iter(methods.values())))],
            rows=[[method, *map(str, values.values())] for method, values in methods.items()],
        )
        for name, methods in table.reported.items()
    ]
    return PlainTables(
        title="What the paper reports",
        text="From DAM's own tables (mean of three runs): for orientation, not for comparison. Its data, splits and "
        "choice of epoch differ.",
        tables=tables,
    )


def _made(table: Table) -> list[str]:
    """The command, the machine and the settings."""
    made = table.provenance
    versions = ", ".join(f"{name} {value}" for name, value in made["made_with"].items() if name != "device")
    failed = f", {made['failed']} failed" if made["failed"] else ""
    return [
        f"```console\n$ {made['command']}\n```",
        f"{made['done']} of {made['cells']} cells{failed}, on {', '.join(made['devices'])}; {versions}. "
        f"Seeds {', '.join(map(str, made['seeds']))}; {made['selection']}, which needs no groups.",
        f"Training plan, defaults included: {_settings(made['plan'])}.",
        *(f"- {names}: {_settings(own)}." for names, own in made["own_plans"].items()),
    ]


def _settings(plan: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {plain_value(value)}" for name, value in plan.items())


def _notes(table: Table) -> list[str]:
    lines = [line for block in table.blocks for line in block.methods]
    costs = [line.cost for line in lines if line.cost]
    search = table.provenance.get("search", {})
    levels = "; ".join(f"{level} {words}" for level, words in enumerate(LADDER))
    notes = [
        "Percent; mean ± standard deviation over seeds, with the 95 % interval of the mean from test sampling (these "
        "models, other test rows).",
        "Differences are paired on seeds and test rows; their interval holds both kinds of chance, training and test.",
        f"Told: the information that a method uses beside its backbone; a level includes those below it: {levels}.",
        "Bold: the best of the methods of levels 0 to 2, where its difference from every other one of them is "
        "significant (5 %, Bonferroni).",
        f"s: wall seconds of training, all stages; MiB: peak memory ({costs[0].mib_of if costs else 'not known'}).",
    ]
    if any(line.search for line in lines):
        notes.append(
            "Each method was tried with the same number of random configurations (and the settings of the grid) on "
            "seeds of their own; no trial looked at the test rows of its split. Where the split follows the seed, that "
            "is another split of the same data: rows that test a method here may have helped to choose its "
            "configuration, though never to train it."
        )
    if search.get("undecided"):
        notes.append(f"Not shown, as trials are missing or all have failed: {', '.join(search['undecided'])}.")
    if search.get("with_groups"):
        notes.append(
            "Chosen with groups: the configuration with the best worst (class, group) accuracy on the validation rows, "
            "whose groups it needs. Methods without such a line would keep their configuration, or have too few rows "
            "of some class and group to say."
        )
    shared = max((cost.shared_by for cost in costs), default=1)
    if shared > 1:
        notes.append(f"Up to {shared} cells shared the device: seconds are longer than alone, Wh are equal shares.")
    return notes
