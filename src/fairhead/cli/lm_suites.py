"""`fairhead lm suite` and `fairhead lm compare`: every benchmark on a model, and what a change of a model did.

Also what all commands of `fairhead lm` share: how a model is loaded, and how intervals are made.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_type_hints

import typer

from fairhead.cli.common import check_output, command_line, is_first, need, progress, write_json
from fairhead.cli.options import attribute_texts, options
from fairhead.errors import InputError
from fairhead.language.answers import Sampling
from fairhead.settings import Count, Level, Option, Replicates, Seed
from fairhead.store import locked, write_text

if TYPE_CHECKING:
    from fairhead.language.benchmark import Benchmark
    from fairhead.language.scorer import Scorer
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
_SUITE = """
The folder of the data has one folder (or zip archive) a benchmark, as published: {folders}. What is not there is
skipped and named. Perplexity and attention entropy are taken on the Wikipedia texts that come with BOLD, or on a text
file of your own (`--text`, paragraphs being documents).

A run that was killed goes on where it stopped: give the same command again.

**Examples**

    fairhead lm suite --model SmolLM2-135M --data DATA --out runs/base

    fairhead lm suite --model SmolLM2-135M-klaad --data DATA --out runs/klaad

    fairhead lm compare runs/base runs/klaad --html before-after.html
"""


@dataclass(frozen=True)
class Computing:
    """Where and how a model computes.

    Attributes:
        device: where to compute: cpu, cuda, cuda:1, ...; auto takes a GPU where there is one.
        dtype: precision; auto is float32 on a processor and bfloat16 on a GPU.
        batch_tokens: tokens of a batch, padding included.
        start: token that texts start with: bos, eos, none or a token; default is BOS, or end of text if there is none.
        convention: where it stands. fairhead: before every text; lm-eval: only where no context stands before, as
            lm-evaluation-harness does; bias-bench: before the first token, the others are read without it, as in the
            published scripts of StereoSet and CrowS-Pairs.
        chat: put every prompt into the chat template of the model, as a user's message; what is scored is the answer,
            as lm-evaluation-harness does it. A text without a prompt answers an empty message.
        device_map: spread the layers over several GPUs: auto, balanced or sequential (accelerate).
        load_in: round weights to 8bit or 4bit as they are loaded (bitsandbytes, on a GPU).
    """

    panel: ClassVar[str] = "Model"
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    batch_tokens: Annotated[Count | None, Option(metavar="N")] = None
    start: Annotated[str, Option(metavar="TOKEN")] = "default"
    convention: Annotated[Literal["fairhead", "lm-eval", "bias-bench"], Option("--as")] = "fairhead"
    chat: bool = False
    device_map: Literal["auto", "balanced", "sequential"] | None = None
    load_in: Literal["8bit", "4bit"] | None = None


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
        raise InputError(f"{path} has no place for figures; one line {begin} and one {end} are expected")
    return page.partition(begin)[0], page.partition(end)[2]


def commands() -> "dict[str, Benchmark]":
    """Benchmarks by the name of their command; where several share one, the last has it."""
    from fairhead.language.benchmarks import all_benchmarks

    found = all_benchmarks()
    owners = {benchmark.flag: benchmark for benchmark in found}
    return {b.flag if owners[b.flag] is b else b.name: b for b in found}


def suite_epilog() -> str:
    """What stands below the help of the suite."""
    folders = dict.fromkeys(f"`{b.data or b.name}`" for b in commands().values())
    return _SUITE.format(folders=", ".join(folders))


def suite_command() -> Callable[..., None]:
    """The command of the suite, with the options of all benchmarks."""
    names = ", ".join(dict.fromkeys(benchmark.flag for benchmark in commands().values()))

    @dataclass(frozen=True)
    class Suite:
        model: Annotated[str, Option(metavar="PATH")]
        data: Annotated[Path, Option(metavar="DIR")]
        out: Annotated[Path, Option(metavar="DIR")]
        only: Annotated[str | None, Option(metavar="NAMES")] = None
        limit: Annotated[Count | None, Option(metavar="N")] = None
        text: Annotated[str | None, Option(metavar="FILE")] = None
        documents: Annotated[Count, Option(metavar="N")] = 1000
        bold_batch_size: Annotated[Count, Option(metavar="N")] = 64

    Suite.__doc__ = f"""What is measured on what.

    Attributes:
        model: folder of a causal language model, or its name on the hub if it is cached (hub:NAME fetches it).
        data: folder with one folder a benchmark, as published.
        out: folder for journals, tables of items and figures.
        only: benchmarks, with commas between: {names}.
        limit: only so many items of each benchmark, drawn at random with --seed.
        text: a text file for perplexity and attention entropy, in place of BOLD's Wikipedia texts.
        documents: how many are drawn from that text; attention entropy takes 200 of them.
        bold_batch_size: prompts of BOLD that are continued together.
    """

    takes = {"context": typer.Context, "chosen": Suite, "of": _options_of_all()}
    return options("lm", takes=takes | {"computing": Computing, "statistics": Statistics})(_run_suite)


def _options_of_all() -> type:
    """The options of all benchmarks in one class; those that only change what is shown are left out."""
    from fairhead.language.benchmark import SHOWS

    found: dict[str, tuple[str, Any, Any]] = {}
    lines = []
    for benchmark in commands().values():
        hints, texts = get_type_hints(benchmark.options, include_extras=True), attribute_texts(benchmark.options)
        for one in fields(benchmark.options):
            if one.name not in found and one.name not in benchmark.options_with(SHOWS):
                found[one.name] = (one.name, hints[one.name], field(default=one.default))
                lines.append(f"        {one.name}: {benchmark.title}: {texts[one.name]}")
    panel = {"panel": "Options of single benchmarks"}
    made = make_dataclass("OptionsOfAll", found.values(), frozen=True, namespace=panel)
    made.__doc__ = "\n".join(["Options of single benchmarks.\n\n    Attributes:", *lines])
    return made


def _run_suite(context: typer.Context, chosen: Any, of: Any, computing: Computing, statistics: Statistics) -> None:
    """Run every benchmark on a model, into one folder that can be compared with another."""
    from fairhead.language.running import gather_items, run_suite

    how = statistics.resampling()
    names = tuple(name.strip() for name in (chosen.only or "").split(",") if name.strip())
    drawn = {"limit": chosen.limit, "seed": how.seed, "text": chosen.text, "documents": chosen.documents}
    # The data first: a mistake there should not wait for the model.
    items = gather_items(chosen.data, names, **drawn, **vars(of))
    if is_first():
        context.with_resource(locked(chosen.out))
    scorer = load_model(chosen.model, computing)
    made = {"command": command_line(context), "data_path": str(chosen.data), "device": str(scorer.device)}
    with progress() as bars:
        sampling = Sampling(batch_size=chosen.bold_batch_size)
        suite = run_suite(scorer, items, chosen.out, chosen.model, how, sampling, bars.tell, made)
    from fairhead.report import write

    write(suite.page(), chosen.out / "report.html")
    suite.show()
    typer.echo(f"report: {chosen.out / 'report.html'}")


def load_model(path: str, computing: Computing) -> "Scorer":
    """A scorer of a model; with several processes it is the first's, and the others work for it and end here."""
    need()
    from fairhead.language.scorer import load_scorer, shared

    found: Scorer = shared(load_scorer(path, **vars(computing)))
    return found
