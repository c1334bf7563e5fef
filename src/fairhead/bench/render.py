"""A table as Markdown, as one self-contained HTML page, and as JSON."""

import json
from pathlib import Path
from typing import Any

from fairhead.bench.frontier import draw
from fairhead.bench.results import SIGNIFICANCE, Block, Line, Table, is_better
from fairhead.report import wording
from fairhead.report.page import environment
from fairhead.store import write_text

_MINUS = wording.MINUS
_NAMES = {"accuracy": "accuracy", "worst_group_accuracy": "worst group"}


def write_table(table: Table, folder: Path | str) -> Path:
    """Write table.md, table.json and table.html to a folder; return the path of the page.

    Raises:
        InputError: the folder cannot be written.
    """
    folder = Path(folder)
    texts = {
        "table.md": markdown(table),
        "table.json": json.dumps(table.to_dict(), ensure_ascii=False, allow_nan=False, indent=1, default=str) + "\n",
        "table.html": html(table),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    return folder / "table.html"


def metric_title(metric: str) -> str:
    """The short name of a metric, for the head of a column."""
    return _NAMES.get(metric, metric)


def points(value: float | None, signed: bool = False) -> str:
    """A fraction as percent points with one decimal, or a dash.

    Example:
        >>> points(0.1234), points(-0.02, signed=True) == _MINUS + "2.0", points(None)
        ('12.3', True, '–')
    """
    if value is None:
        return "–"
    rounded = round(100 * value, 1) + 0.0
    sign = _MINUS if rounded < 0 else "+" if signed and rounded > 0 else ""
    return f"{sign}{abs(rounded):.1f}"


def figure_text(line: Line, metric: str) -> str:
    """Mean ± sd over seeds."""
    figure = line.figures.get(metric)
    if figure is None or figure.mean is None:
        return "undefined" if figure is not None else "–"
    return points(figure.mean) + (f" ± {points(figure.sd)}" if figure.sd is not None else "")


def interval_text(line: Line, metric: str) -> str:
    """The test-sampling interval."""
    figure = line.figures.get(metric)
    return "" if figure is None or figure.low is None else f"{points(figure.low)} to {points(figure.high)}"


def difference_text(line: Line, metric: str) -> str:
    """The paired difference from the baseline with its interval."""
    difference = line.differences.get(metric)
    if difference is None or difference.value is None:
        return "–"
    text = points(difference.value, signed=True)
    if difference.low is None:
        return text
    return f"{text} ({points(difference.low, signed=True)} to {points(difference.high, signed=True)})"


def look(line: Line, metric: str) -> str:
    """The CSS class of a difference: told from the baseline for better or worse, or vague."""
    p, difference = line.p_adjusted.get(metric), line.differences.get(metric)
    if p is None or difference is None or difference.value is None or p >= SIGNIFICANCE:
        return "vague"
    return "better" if is_better(metric, difference.value) else "worse"


def cost_text(value: float | None, digits: int = 0) -> str:
    """A cost, or what can be said where it is not known."""
    return "not known" if value is None else f"{value:,.{digits}f}".replace(",", wording.THIN_SPACE)


def markdown(table: Table) -> str:
    """The table as Markdown."""
    parts = [f"# {table.title}", table.about.strip(), "**In short.**"]
    parts += [f"- {_heading(block)}. {block.verdict}" for block in table.blocks]
    for block in table.blocks:
        parts += [f"## {_heading(block)}", *(f"- {finding}" for finding in block.findings), ""]
        parts.append(_figures_markdown(table, block))
        parts.append(
            f"Difference from {table.baseline} in points, paired: 95 % interval, p (Holm), smallest detectable"
        )
        parts.append(_differences_markdown(table, block))
        if any(line.search for line in block.lines):
            parts += [search_caption(block), _search_markdown(block)]
        failed = [
            f"- {line.method}, seed {seed}: {error}" for line in block.lines for seed, error in line.failed.items()
        ]
        parts += ["Failed:", "", *failed] if failed else []
    parts += ["## How to read this", " ".join(_notes(table)), "## How it was made", *_made(table)]
    return "\n\n".join(_joined(parts)) + "\n"


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


def _heading(block: Block) -> str:
    return f"{block.data}, {block.backbone}: by {block.group}, {block.n} test rows"


def _figures_markdown(table: Table, block: Block) -> str:
    head = ["method", "seeds", *(metric_title(m) for m in table.metrics), "s", "Wh", "MiB"]
    lines = [_row(head), _row(["---"] * len(head))]
    for line in block.lines:
        cells = []
        for metric in table.metrics:
            text = figure_text(line, metric)
            text = f"**{text}**" if metric in line.best else text
            interval = interval_text(line, metric)
            cells.append(f"{text} ({interval})" if interval else text)
        cost = line.cost
        costs = (
            ["–"] * 3 if cost is None else [cost_text(cost.seconds), cost_text(cost.watt_hours, 1), cost_text(cost.mib)]
        )
        lines.append(_row([_method(line), str(len(line.seeds)), *cells, *costs]))
    return "\n".join(lines)


def _differences_markdown(table: Table, block: Block) -> str:
    head = ["method", *(metric_title(m) for m in table.metrics)]
    lines = [_row(head), _row(["---"] * len(head))]
    for line in block.lines:
        if not line.differences:
            continue
        cells = []
        for metric in table.metrics:
            text = difference_text(line, metric)
            p, mde = line.p_adjusted.get(metric), line.differences[metric].mde
            cells.append(f"{text}, p {wording.p_value(p)}, {points(mde)}" if p is not None else text)
        lines.append(_row([_method(line), *cells]))
    return "\n".join(lines)


def search_caption(block: Block) -> str:
    """What a search was, in a sentence."""
    found = [line.search for line in block.lines if line.search]
    seconds = sum(choice.seconds for choice in found if not choice.with_groups)
    watt_hours = [choice.watt_hours for choice in found if not choice.with_groups]
    energy = [value for value in watt_hours if value is not None]
    cost = f"{cost_text(seconds)} s" + (f", {cost_text(sum(energy), 1)} Wh" if len(energy) == len(watt_hours) else "")
    return (
        f"Search of hyper-parameters: {found[0].trials} trials a method, all on validation rows; {cost} in all, "
        "not counted in the costs above"
    )


def search_texts(line: Line) -> list[str]:
    """Of a line with a search: what was drawn, what was chosen, its score and the grid's own, trials, seconds, Wh."""
    choice = line.search
    assert choice is not None
    searched = ", ".join(f"{name} {prior}" for name, prior in choice.searched.items()).replace("_", " ")
    chosen = ", ".join(f"{name} {wording.plain_value(value)}" for name, value in choice.values.items()).replace(
        "_", " "
    )
    failed = f" ({choice.failed} failed)" if choice.failed else ""
    return [
        searched or "nothing",
        chosen or "as the grid has it",
        f"{points(choice.score)} ({points(choice.own_score)})",
        f"{choice.trials}{failed}",
        cost_text(choice.seconds),
        cost_text(choice.watt_hours, 1),
    ]


SEARCH_HEAD = ("searched", "chosen", "validation score (the grid's own)", "trials", "s", "Wh")


def _search_markdown(block: Block) -> str:
    head = ["method", *SEARCH_HEAD]
    lines = [_row(head), _row(["---"] * len(head))]
    return "\n".join([*lines, *(_row([_method(line), *search_texts(line)]) for line in block.lines if line.search)])


def _method(line: Line) -> str:
    return f"{line.method}{line.aside}"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _made(table: Table) -> list[str]:
    """The command, the machine and the settings."""
    made = table.provenance
    versions = ", ".join(f"{name} {value}" for name, value in made["made_with"].items() if name != "device")
    settings = ", ".join(f"{name} {wording.plain_value(value)}" for name, value in made["plan"].items())
    failed = f", {made['failed']} failed" if made["failed"] else ""
    return [
        f"```console\n$ {made['command']}\n```",
        f"{made['done']} of {made['cells']} cells{failed}, on {', '.join(made['devices'])}; {versions}. "
        f"Seeds {', '.join(str(seed) for seed in made['seeds'])}; {settings or 'the settings of the grid'}; "
        f"{made['selection']}, which needs no groups.",
    ]


def _notes(table: Table) -> list[str]:
    notes = [
        "Percent; mean ± standard deviation over seeds, with the 95 % interval of the mean from test sampling (these "
        "models, other test rows).",
        "Differences are paired on seeds and test rows; their interval holds both kinds of chance, training and test.",
        "Bold: the best method without groups, where its difference from every other one can be told from noise "
        "(5 %, Bonferroni).",
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


def html(table: Table) -> str:
    """The table as one page that needs no network and no other file."""
    functions: dict[str, Any] = {
        "points": points,
        "figure_text": figure_text,
        "interval_text": interval_text,
        "difference_text": difference_text,
        "look": look,
        "cost_text": cost_text,
        "p_value": wording.p_value,
        "metric_title": metric_title,
        "heading": _heading,
        "search_caption": search_caption,
        "search_texts": search_texts,
        "search_head": SEARCH_HEAD,
        "draw": draw,
        "notes": _notes(table),
    }
    return environment("fairhead.bench").get_template("table.html").render(table=table, **functions)
