"""Writes one page per method into `methods/`: what it does, its settings, and its figures in the results pages."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

from fairhead.cli.options import attribute_texts
from fairhead.mitigate import LADDER, METHODS, MethodEntry

DOCS = Path(__file__).parent
# What runs are called on the pages about language models, where that is not the method's name.
RUNS = {"unlearn": "bias_unlearn", "sentence": "sentence_debias", "self": "self_debias", "control": "balance_control"}
RUNS |= {"balance": "balance_pairs", "fast": "balance_pairs"}
LANGUAGE = ("StereoSet (held-out terms) ss", "CrowS-Pairs ss", "WinoBias pro likelier", "Held-out text perplexity")


def write_pages() -> None:
    """A page for each dataclass of settings; variants of a method share one."""
    if not _figures([METHODS["dam"]]) or not _language_figures(METHODS["klaad"]):
        raise ValueError("no figures are found in docs/results: have the heads of its tables changed?")
    families: dict[str, list[MethodEntry]] = {}
    for entry in METHODS.values():
        families.setdefault(entry.settings, []).append(entry)
    folder = DOCS / "methods"
    folder.mkdir(exist_ok=True)
    for entries in families.values():
        text = "\n\n".join(part for part in _parts(entries) if part) + "\n"
        path = folder / f"{entries[0].name}.md"
        if not path.is_file() or path.read_text() != text:  # what has not changed is not built again
            path.write_text(text)


def _parts(entries: list[MethodEntry]) -> list[str]:
    first = entries[0]
    said = f"It trains classifiers of pictures or texts. It uses: {LADDER[first.told]}."
    given = "--data images:labels.csv --label smiling --group sex --model vit-8x8"
    given += " --reference-group sex" if first.uses_groups else ""
    if first.kind == "language":
        reads = not hasattr(first.load(), "attach")
        said = f"It changes causal language models{'' if reads else ' at decoding, and needs no data'}."
        given = f"--model hub:HuggingFaceTB/SmolLM2-135M{' --data pairs:own.csv' if reads else ''}"
    about = inspect.cleandoc(first.load().__doc__ or "").partition("\n\nAttributes:")[0].partition("\n\nExample:")[0]
    figures = _language_figures(first) if first.kind == "language" else _figures(entries)
    return [
        f"# {first.name}",
        f"{first.about[:1].upper()}{first.about[1:]}.",
        "" if about == "The settings." else about,
        said,
        f"```console\n$ fairhead mitigate {first.name} {given} --out run\n```",
        _variants(entries[1:]),
        "## Results",
        _verdicts(entries),
        figures or "No [results page](../evidence.md) includes it yet.",
        _settings(first),
    ]


def _variants(entries: list[MethodEntry]) -> str:
    rows = [f"| `{e.name}` | {e.about} | {_options(e)} |" for e in entries]
    return _table("| variant | description | settings |", rows) if rows else ""


def _options(entry: MethodEntry) -> str:
    return ", ".join(f"{name} {value}" for name, value in entry.options.items())


def _settings(entry: MethodEntry) -> str:
    texts = attribute_texts(entry.load())
    rows = []
    for setting in fields(entry.load()):
        default = "" if setting.default is MISSING else f"`{entry.options.get(setting.name, setting.default)!r}`"
        rows.append(f"| `{setting.name}` | {default} | {texts.get(setting.name, '').replace('|', chr(92) + '|')} |")
    return "## Settings\n\n" + _table("| setting | default | meaning |", rows) if rows else ""


def _table(head: str, rows: list[str]) -> str:
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows])


def _plain(name: str) -> str:
    return re.sub(r"\(.*?\)|[^a-z0-9]", "", name.lower())


def _verdicts(entries: list[MethodEntry]) -> str:
    """The lines of the table of verdicts whose first words name the method."""
    known = {_plain(entry.name) for entry in entries} | {_plain(entries[0].settings.partition(":")[2])}
    found = []
    for line in (DOCS / "verdicts.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        named = {_plain(name).removesuffix("ing") for name in cells[0].partition(":")[0].split(",")}
        if line.startswith("| ") and len(cells) == 4 and known & named:
            claim = cells[0].partition(": ")[2]
            found.append(f"- {f'*{claim}*. ' if claim else ''}{cells[1]}: {cells[2]} ({cells[3]})")
    return (
        "\n".join(found).replace("](results/", "](../results/").replace("the same pages", "[evidence](../evidence.md)")
    )


def _figures(entries: list[MethodEntry]) -> str:
    """Its differences from what each grid compares with, from the tables there."""
    names, rows = {entry.name for entry in entries}, []
    for page, where, found in _rows("| method |"):
        if {"against", "EOd", "accuracy"} <= found.keys():
            name = found["method"].replace("*", "")
            if re.split(r"[ ,]", name)[0] in names:
                figures = f"{found['against']} | {found['EOd']} | {found['accuracy']}"
                rows.append(f"| [{where}](../results/{page}) | {name} | {figures} |")
    if not rows:
        return ""
    said = "Differences in points with 95 % intervals, over the seeds and test rows of each page (erm: plain training):"
    return f"{said}\n\n" + _table("| grid | method | against | EOd | accuracy |", rows)


def _language_figures(entry: MethodEntry) -> str:
    """Its changes of the figures that matter most, from the tables before and after."""
    rows = []
    for page, _, found in _rows("| | run | before | after | change (95 % interval) |"):
        run = found["run"].partition("-")[0]
        if found[""] in LANGUAGE and RUNS.get(run, run) == entry.name:
            change = f"{found['before']} | {found['after']} | {found['change (95 % interval)']} | {found['p, Holm']}"
            rows.append(f"| [{found['run']}](../results/{page}) | {found['']} | {change} |")
    said = "Before and after, with the 95 % interval of the change and its p corrected over all figures of the page:"
    return f"{said}\n\n" + _table("| run | figure | before | after | change | p |", rows) if rows else ""


def _rows(head: str) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Page, heading and cells by column, of all rows below a head that begins like this, on all pages of results.

    Where a line above the head says what the table is the difference from, that is the cell "against".
    """
    for page in sorted((DOCS / "results").glob("*.md")):
        where, columns, against = "", [], ""
        for line in page.read_text().splitlines():
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if line.startswith("#"):
                where = line.lstrip("# ")
            if line.startswith("Difference from "):
                against = line.removeprefix("Difference from ").partition(" in ")[0]
            if re.sub(" +", " ", line).startswith(head):
                columns = cells
            elif columns and not line.startswith("|"):
                columns, against = [], ""
            elif columns and not line.startswith("| ---"):
                found = dict(zip(columns, cells, strict=False))
                yield page.name, where, {**found, "against": against} if against else found
