"""`fairhead lm compare`: what a change of a language model did, from the folders of two or more suites."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from fairhead.cli.common import check_output, command_line, write_json
from fairhead.cli.options import options
from fairhead.errors import InputError
from fairhead.settings import Level, Option, Replicates, Seed
from fairhead.store import write_text

if TYPE_CHECKING:
    from fairhead.stats.bootstrap import Resampling

EPILOG = """
Every figure is paired: the models answered the same items, and whole clusters of items (templates, terms, occupations,
pages) are drawn together. *better* and *worse* are about the distance to an even model, need an interval that leaves
out 0, and p < 0.05 after Holm's correction over all figures of all runs; otherwise a difference is *not significant*,
and the smallest difference that the figure alone would have shown is given (none where there are too few clusters).
StereoSet is scored on terms that none of the models was trained on.

Runs of lm-evaluation-harness (`--log_samples`: the folder, or one `samples_*.jsonl`) and of inspect_ai (JSON logs) are
compared in the same way, task by task, joined on their documents. Samples are independent of each other unless
`--cluster` names the field that those of one template or person share.

**Examples**

    fairhead lm compare runs/base runs/klaad --html before-after.html

    fairhead lm compare runs/base runs/klaad runs/ce runs/cda --names base,KLAAD,control,CDA --json all.json

    fairhead lm compare lm-eval/base lm-eval/tuned --category bias_type

    fairhead lm compare runs/ce runs/klaad      # KLAAD against plain fine-tuning on the same sentences
"""
_BEGIN, _END = "<!-- figures: begin -->", "<!-- figures: end -->"


@dataclass(frozen=True)
class Statistics:
    """How intervals are made.

    Attributes:
        n_boot: bootstrap replicates; 2000 by default, 1000 of BOLD alone.
        seed: same seed, same figures.
        level: confidence level of intervals.
    """

    panel: ClassVar[str] = "Statistics"
    n_boot: Annotated[Replicates | None, Option(metavar="N")] = None
    seed: Annotated[Seed, Option(metavar="N")] = 0
    level: Annotated[Level, Option(metavar="SHARE")] = 0.95

    def resampling(self, n_boot: int = 2000) -> "Resampling":
        """The same with a number of replicates where none was given."""
        from fairhead.stats.bootstrap import Resampling

        return Resampling(self.n_boot or n_boot, self.seed, self.level)


@dataclass(frozen=True)
class Comparing(Statistics):
    """How intervals and p-values are made.

    Attributes:
        n_perm: random swaps of each p-value, at most.
    """

    n_perm: Annotated[Replicates, Option(metavar="N")] = 100_000


@dataclass(frozen=True)
class Logs:
    """How samples of another harness belong together.

    Attributes:
        cluster: field of a document (of inspect_ai: of the metadata) whose equal values are drawn together.
        category: field whose values are also compared one by one.
    """

    panel: ClassVar[str] = "Logs of other harnesses"
    cluster: Annotated[str | None, Option(metavar="FIELD")] = None
    category: Annotated[str | None, Option(metavar="FIELD")] = None


@dataclass(frozen=True)
class Pages:
    """What is written.

    Attributes:
        names: what to call the runs, with commas between.
        html: write a report, and its JSON beside it.
        json: write JSON; - prints only JSON.
        markdown: write Markdown. In a file that is there, only what stands between the two lines
            `<!-- figures: begin -->` and `<!-- figures: end -->` is replaced.
    """

    panel: ClassVar[str] = "Output"
    names: Annotated[str | None, Option(metavar="NAMES")] = None
    html: Annotated[str | None, Option(metavar="FILE")] = None
    json: Annotated[str | None, Option(metavar="FILE")] = None
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
    """What did a change of a model do: stereotypes, spill-over, language, attention? Needs no torch."""
    html, json_path, markdown = pages.html, pages.json, pages.markdown
    for path in (html, json_path, None if markdown is None else str(markdown)):
        check_output(path)
    if html is not None and not html.lower().endswith(".html"):
        raise InputError(f"--html is {html}; a path that ends in .html is expected")
    if html is not None and json_path is not None and Path(html).with_suffix(".json") == Path(json_path):
        raise InputError(f"--html writes the report's own JSON to {json_path}; choose another name for --json")
    around = ("", "") if markdown is None else _page_around(markdown)
    from fairhead.language.before_after import compare_suites
    from fairhead.language.before_after_report import markdown_of

    called = [name.strip() for name in pages.names.split(",")] if pages.names else None
    found = compare_suites(folders, called, statistics.resampling(), statistics.n_perm, logs.cluster, logs.category)
    if json_path is not None:
        write_json(found.to_dict(), json_path)
    if html is not None:
        from fairhead.report import write

        write(found.page(command_line(context)), html)
    if markdown is not None:
        write_text(markdown, f"{around[0]}{_BEGIN}\n\n{markdown_of(found)}\n{_END}{around[1]}")
    if json_path != "-":
        found.show()


def _page_around(path: Path) -> tuple[str, str]:
    """What stands before and after the figures of a Markdown page; found out before the work is done."""
    if not path.is_file():
        return "", "\n"
    try:
        page = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if page.count(_BEGIN) != 1 or page.count(_END) != 1 or page.index(_BEGIN) > page.index(_END):
        raise InputError(f"{path} has no place for figures; one line {_BEGIN} and one {_END} are expected")
    return page.partition(_BEGIN)[0], page.partition(_END)[2]
