"""A table as a report, as Markdown and as JSON."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairhead.bench.table import Block, Table
from fairhead.mitigate.registry import LADDER
from fairhead.report import Report, Sentence, render
from fairhead.report.form import build_dataclass, plain
from fairhead.report.sections import Section
from fairhead.report.sections.bench_block import BenchBlock, column_name, markdown_table
from fairhead.report.sections.plain import PlainTable, PlainTables, Text
from fairhead.report.wording import plain_value
from fairhead.store import write_json, write_text


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
    verdicts = [f"{_heading(block)}. {block.verdict}" if several else block.verdict for block in table.blocks]
    sections: list[Section] = [_section(table, block) for block in table.blocks]
    if table.reported:
        sections.append(_reported(table))
    sections.append(Text(title="How to read this", text="\n\n".join(_notes(table))))
    return Report(
        title=table.title,
        question=table.about,
        verdict=[Sentence(text, "note") for text in verdicts],
        sections=sections,
        provenance=table.provenance,
        brand="bench",
    )


def _section(table: Table, block: Block) -> BenchBlock:
    values = {"title": _heading(block), "baseline": table.baseline, "metrics": table.metrics, **block.to_dict()}
    return build_dataclass(BenchBlock, plain(values, "block"), "block")


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


def markdown(table: Table) -> str:
    """The table as Markdown."""
    parts = [f"# {table.title}", table.about.strip(), "**In short.**"]
    parts += [f"- {_heading(block)}. {block.verdict}" for block in table.blocks]
    for block in table.blocks:
        parts += [f"## {_heading(block)}", *_section(table, block).markdown()]
    if table.reported:
        reported = _reported(table)
        parts += [f"## {reported.title}", reported.text]
        for found in reported.tables:
            parts += [found.caption, markdown_table(found.columns, found.rows)]
    parts += ["## How to read this", " ".join(_notes(table)), "## How it was made", *_made(table)]
    return "\n\n".join(_joined(parts)) + "\n"


def _heading(block: Block) -> str:
    return f"{block.data}, {block.backbone}: by {block.group}, {block.n} test rows"


def _joined(parts: list[str]) -> list[str]:
    """Bullets that follow each other stay one list."""
    out: list[str] = []
    for part in parts:
        if not part:
            continue
        if part.startswith("- ") and out and out[-1].rpartition("\n")[2].startswith("- "):
            out[-1] += "\n" + part
        else:
            out.append(part)
    return out


def _made(table: Table) -> list[str]:
    """The command, the machine and the settings."""
    made = table.provenance
    versions = ", ".join(f"{name} {value}" for name, value in made["made_with"].items() if name != "device")
    failed = f", {made['failed']} failed" if made["failed"] else ""
    return [
        f"```console\n$ {made['command']}\n```",
        f"{made['done']} of {made['cells']} cells{failed}, on {', '.join(made['devices'])}; {versions}. "
        f"Seeds {', '.join(str(seed) for seed in made['seeds'])}; {made['selection']}, which needs no groups.",
        f"Training plan, defaults included: {_settings(made['plan'])}.",
        *(f"- {names}: {_settings(own)}." for names, own in made["own_plans"].items()),
    ]


def _settings(plan: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {plain_value(value)}" for name, value in plan.items())


def _ladder() -> str:
    return "; ".join(f"{rung} {words}" for rung, words in enumerate(LADDER))


def _notes(table: Table) -> list[str]:
    notes = [
        "Percent; mean ± standard deviation over seeds, with the 95 % interval of the mean from test sampling (these "
        "models, other test rows).",
        "Differences are paired on seeds and test rows; their interval holds both kinds of chance, training and test.",
        f"Told: what a method knows beside its backbone; each rung has those below it: {_ladder()}.",
        "Bold: the best of the methods on rungs 0 to 2, where its difference from every other one of them is "
        "significant (5 %, Bonferroni).",
        "s: wall seconds of training, all stages; MiB: peak memory "
        f"({next((line.cost.mib_of for b in table.blocks for line in b.lines if line.cost), 'not known')}).",
    ]
    if any(line.search for block in table.blocks for line in block.lines):
        notes.append(
            "Each method was tried with the same number of random configurations (and the settings of the grid) on "
            "seeds of their own; no trial looked at the test rows of its split. Where the split follows the seed, that "
            "is another split of the same data: rows that test a method here may have helped to choose its "
            "configuration, though never to train it."
        )
    undecided = table.provenance.get("search", {}).get("undecided")
    if undecided:
        notes.append(f"Not shown, as trials are missing or all have failed: {', '.join(undecided)}.")
    if table.provenance.get("search", {}).get("with_groups"):
        notes.append(
            "Chosen with groups: the configuration with the best worst (class, group) accuracy on the validation rows, "
            "whose groups it needs. Methods without such a line would keep their configuration, or have too few rows "
            "of some class and group to say."
        )
    shared = max((line.cost.shared_by for b in table.blocks for line in b.lines if line.cost), default=1)
    if shared > 1:
        notes.append(f"Up to {shared} cells shared the device: seconds are longer than alone, Wh are equal shares.")
    return notes
