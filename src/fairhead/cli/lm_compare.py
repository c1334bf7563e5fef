"""`fairhead lm compare`: what a change of a language model did."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from fairhead.cli.common import Output, Statistics, check_output, command_line, write_json
from fairhead.cli.options import options
from fairhead.errors import InputError
from fairhead.settings import Option, Replicates
from fairhead.store import write_text

EPILOG = """
Every comparison is paired: the models answered the same items. The bootstrap resamples whole clusters of items
(templates, terms, occupations, pages). *better* and *worse* refer to the distance from an even model. They require an
interval that excludes 0 and p < 0.05 after Holm's correction over all figures of all runs. Otherwise a difference is
*not significant*, and the smallest difference that the figure alone could have detected is given (unless there are too
few clusters). StereoSet is scored on terms that none of the models was trained on.

Runs of lm-evaluation-harness (`--log_samples`: the folder, or one `samples_*.jsonl`) and of inspect_ai (JSON logs) are
compared in the same way, task by task, joined on their documents. Samples count as independent, unless `--cluster`
names a field that the samples of one template or person share.

**Examples**

    fairhead lm compare runs/base runs/klaad --html before-after.html

    fairhead lm compare runs/base runs/klaad runs/ce runs/cda --names base,KLAAD,control,CDA --json all.json

    fairhead lm compare lm-eval/base lm-eval/tuned --category bias_type

    fairhead lm compare runs/ce runs/klaad      # KLAAD against plain fine-tuning on the same sentences
"""


@dataclass(frozen=True)
class Comparing(Statistics):
    """How intervals and p-values are made.

    Attributes:
        n_perm: maximum number of random permutations for each p-value.
    """

    n_perm: Annotated[Replicates, Option(metavar="N")] = 100_000


@dataclass(frozen=True)
class Logs:
    """How samples of another harness belong together.

    Attributes:
        cluster: field of a document (inspect_ai: of the metadata); the bootstrap resamples equal values together.
        category: field whose values are also compared one by one.
    """

    panel: ClassVar[str] = "Logs of other harnesses"
    cluster: Annotated[str | None, Option(metavar="FIELD")] = None
    category: Annotated[str | None, Option(metavar="FIELD")] = None


@dataclass(frozen=True)
class Pages(Output):
    """What is written.

    Attributes:
        names: names of the runs, separated by commas.
        markdown: write Markdown. In an existing file, only the text between the lines
            `<!-- figures: begin -->` and `<!-- figures: end -->` is replaced.
    """

    names: Annotated[str | None, Option(metavar="NAMES")] = None
    markdown: Annotated[Path | None, Option(metavar="FILE")] = None


@options("lm")
def compare_command(
    context: typer.Context,
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of fairhead lm suite, or logs of another harness; the first is before.",
            metavar="BEFORE AFTER...",
        ),
    ],
    statistics: Comparing,
    logs: Logs,
    pages: Pages,
) -> None:
    """Compare a model before and after a change: stereotypes, spill-over, language, attention. Needs no torch."""
    html, json_path, markdown = pages.html, pages.json, pages.markdown
    pages.check()
    check_output(None if markdown is None else str(markdown))
    around = ("", "") if markdown is None else _page_around(markdown)
    from fairhead.language.before_after import compare_suites, markdown_of
    from fairhead.report.model_card import FIGURES

    called = [name.strip() for name in pages.names.split(",")] if pages.names else None
    found = compare_suites(folders, called, statistics.resampling(), statistics.n_perm, logs.cluster, logs.category)
    if json_path is not None:
        write_json(found.to_dict(), json_path)
    if html is not None:
        from fairhead.report import write

        write(found.page(command_line(context)), html)
    if markdown is not None:
        write_text(markdown, f"{around[0]}{FIGURES[0]}\n\n{markdown_of(found)}\n{FIGURES[1]}{around[1]}")
    if json_path != "-":
        found.show()


def _page_around(path: Path) -> tuple[str, str]:
    """What stands before and after the figures of a Markdown page; found out before the work is done."""
    from fairhead.report.model_card import FIGURES

    if not path.is_file():
        return "", "\n"
    try:
        page = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    begin, end = FIGURES
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise InputError(f"{path} has no place for figures; expected one line {begin} and one {end}")
    return page.partition(begin)[0], page.partition(end)[2]
