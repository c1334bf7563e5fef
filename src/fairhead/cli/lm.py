"""`fairhead lm …`: one command a benchmark, made of what the benchmark says of itself, and the suite of them all."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_type_hints

import typer
from typer.core import TyperGroup

from fairhead.cli import lm_compare
from fairhead.cli.common import Output, SentenceColumns, Statistics, command_line, is_first, need, progress, write_json
from fairhead.cli.options import attribute_texts, options, single_command
from fairhead.errors import InputError
from fairhead.language.answers import Progress, Sampling, read_generations
from fairhead.settings import Count, Option
from fairhead.store import locked

if TYPE_CHECKING:
    from fairhead.language.benchmark import Benchmark
    from fairhead.language.scorer import Scorer

_GOES_ON = """
With `--out`, answers are saved as they are made. To continue an interrupted run, repeat the same command. The folder
has the format of a suite (`fairhead lm suite`), so `fairhead lm compare` accepts it.

With several GPUs, `accelerate launch --num_processes 4 -m fairhead lm ...` divides the texts among them. If a model
is too large for one GPU, `--device-map auto` spreads it over several. An 8B model (Llama 3.1) in bfloat16 takes 20 GB
(estimated by `fairhead.language.loading.scoring_memory`), or 12 GB with `--load-in 8bit`.
"""
_ELSEWHERE = """
You can generate texts on one machine and measure them on another:

    fairhead lm {0} --model hub:HuggingFaceTB/SmolLM2-135M --data {0} --generate-only --out runs

    fairhead lm {0} --data {0} --score-only runs/journals/{0}-1a2b3c4d.jsonl --json {0}.json
"""
_SUITE = """
The data folder has one folder (or zip archive) for each benchmark, as published: {folders}. Missing benchmarks are
skipped and listed. Perplexity and attention entropy use the Wikipedia texts that come with BOLD, or your own text file
(`--text`; each paragraph is a document).

To continue an interrupted run, repeat the same command.

**Examples**

    fairhead lm suite --model hub:HuggingFaceTB/SmolLM2-135M --data DATA --out runs/base

    fairhead lm suite --model klaad --data DATA --out runs/klaad

    fairhead lm compare runs/base runs/klaad --html before-after.html
"""


@dataclass(frozen=True)
class Computing:
    """Where and how a model computes.

    Attributes:
        device: device: cpu, cuda, cuda:1, ...; auto uses a GPU if there is one.
        dtype: precision; auto is float32 on a CPU and bfloat16 on a GPU.
        batch_tokens: tokens per batch, including padding.
        start: token that texts start with: bos, eos, none or a token; the default is BOS, or EOS if there is no BOS.
        convention: where to put the start token. fairhead: before every text; lm-eval: only before texts without
            context, as lm-evaluation-harness does; bias-bench: only to score the first token, as the published scripts
            of StereoSet and CrowS-Pairs do.
        chat: put every prompt into the model's chat template as a user message and score the answer, as
            lm-evaluation-harness does. A text without a prompt answers an empty message.
        device_map: spread the layers over several GPUs: auto, balanced or sequential (accelerate).
        load_in: quantize weights to 8bit or 4bit while loading (bitsandbytes, on a GPU).
        engine: what computes log-probabilities. vllm needs vLLM installed, and can neither show attention nor generate.
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
    engine: Literal["transformers", "vllm"] = "transformers"


@dataclass(frozen=True)
class Source:
    """What is measured on what.

    Attributes:
        data: file, folder or zip archive as published, or reader:path.
        model: folder of a causal language model, or a hub name in the local cache (hub:NAME downloads it).
        limit: use only this many items, drawn at random with --seed.
    """

    data: Annotated[str, Option(metavar="PATH")]
    model: Annotated[str, Option(metavar="PATH")]
    limit: Annotated[Count | None, Option(metavar="N")] = None


@dataclass(frozen=True)
class Written(Source):
    """What is measured on what, where a model writes.

    Attributes:
        score_only: measure the generations in this file; needs no model.
        generate_only: write generations and measure nothing.
    """

    model: Annotated[str | None, Option(metavar="PATH")] = None  # type: ignore[assignment]
    score_only: Annotated[str | None, Option(metavar="FILE")] = None
    generate_only: bool = False


@dataclass(frozen=True)
class Answers(Output):
    """What is written.

    Attributes:
        out: folder for the answers, the table of items and the figures.
    """

    out: Annotated[Path | None, Option(metavar="DIR")] = None


class _Benchmarks(TyperGroup):
    """Makes the command of a benchmark when it is asked for, so that other commands need not import any."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*_commands(), "suite", *self.commands]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        known = super().get_command(ctx, cmd_name)
        if known is not None:
            return known
        if cmd_name == "suite":
            folders = dict.fromkeys(f"`{benchmark.data or benchmark.name}`" for benchmark in _commands().values())
            return single_command("suite", _SUITE.format(folders=", ".join(folders)), _suite_command())
        named = cmd_name.replace("-", "_")  # also as its data are called
        commands = _commands()
        benchmark = commands.get(cmd_name) or next((b for b in commands.values() if named in (b.name, b.data)), None)
        return None if benchmark is None else single_command(cmd_name, _epilog(benchmark), _command(benchmark))


lm_app = typer.Typer(
    name="lm",
    cls=_Benchmarks,
    help="Measure stereotypes in causal language models, with intervals.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
lm_app.command("compare", epilog=lm_compare.EPILOG)(lm_compare.compare_command)


def _epilog(benchmark: "Benchmark") -> str:
    examples = "\n\n".join(f"    {example}" for example in benchmark.examples)
    parts = [benchmark.explains, f"**Examples**\n\n{examples}" if examples else "", _GOES_ON]
    return "\n\n".join([*parts, _ELSEWHERE.format(benchmark.flag) if benchmark.prompts else ""])


def _command(benchmark: "Benchmark") -> Callable[..., None]:
    """The command of a benchmark: which settings it takes follows from what the benchmark needs."""
    takes = {"context": typer.Context, "source": Source, "own": benchmark.options}
    if {"pairs", "triplets"} & {*benchmark.kinds}:  # of these there are readers of a user's own data
        takes["columns"] = SentenceColumns
    takes["computing"] = Computing
    if benchmark.prompts:
        takes |= {"source": Written, "sampling": Sampling}
    takes |= {"statistics": Statistics, "output": Answers}
    left_out = []
    if benchmark.prompts or benchmark.section == "Attention":
        left_out += ["batch_tokens", "convention"]
    if not benchmark.prompts and not benchmark.requests:
        left_out.append("chat")

    def run(context: typer.Context, **given: Any) -> None:
        _run(context, benchmark, **given)

    run.__doc__ = benchmark.question
    return options("lm", {"computing": left_out}, takes)(run)


def _run(
    context: typer.Context,
    benchmark: "Benchmark",
    source: Any,
    own: Any,
    computing: Computing,
    statistics: Statistics,
    output: Answers,
    columns: SentenceColumns | None = None,
    sampling: Sampling | None = None,
) -> None:
    from fairhead.language.running import read_data, run_benchmark

    output.check()
    if isinstance(source, Written):
        _check_written(source, output)
    how = statistics.resampling(benchmark.n_boot)
    # The data first, then what the figures need: a mistake there should not wait for the model.
    named = {} if columns is None else columns.options(source.data)
    benchmark, items = read_data(benchmark, source.data, own, source.limit, how.seed, named, source.model)
    generate_only, score_only = (getattr(source, name, None) for name in ("generate_only", "score_only"))
    if not generate_only:
        benchmark.ready(own)
    if output.out is not None and is_first():
        context.with_resource(locked(output.out))
    stored = None if score_only is None else read_generations(Path(score_only))
    scorer = None if source.model is None else _load_model(source.model, computing)
    made = {"command": command_line(context), "data_path": source.data, "limit": source.limit}
    made |= {} if scorer is None else {"device": str(scorer.device)}
    with progress() if scorer is not None else nullcontext() as shown:

        def tell(done: int, total: int) -> None:
            if shown is not None and total:
                shown.tell(benchmark.flag, done, total)

        if generate_only:
            _generate(benchmark, scorer, items, own, sampling, how.seed, output.out, tell)
            return
        result = run_benchmark(
            benchmark,
            scorer,
            items,
            out=output.out,
            limit=source.limit,
            resampling=how,
            progress=tell,
            sampling=sampling,
            stored=stored,
            model=source.model or "",
            provenance=made,
            **vars(own),
        )
    if output.json is not None:
        write_json(result.to_dict(), output.json)
    if output.html is not None:
        from fairhead.report import write

        write(result.page(), output.html)
    if output.json != "-":
        result.show()


def _check_written(source: Written, output: Answers) -> None:
    if source.score_only is not None and (source.generate_only or source.model is not None):
        raise InputError("--score-only uses stored generations: leave out --model and --generate-only")
    if source.score_only is None and source.model is None:
        raise InputError("expected a model (--model PATH) or stored generations (--score-only FILE)")
    if source.generate_only and output.out is None:
        raise InputError("--generate-only needs a folder to write to (--out DIR)")


def _generate(
    benchmark: "Benchmark", scorer: Any, items: Any, own: Any, sampling: Any, seed: int, out: Any, tell: Progress
) -> None:
    from fairhead.language.benchmark import Work
    from fairhead.language.running import continue_prompts

    drawn = replace(sampling, seed=seed)
    work = Work(scorer, items, own, scorer.settings(), drawn, out / "journals", tell)
    found, path = continue_prompts(benchmark, work)
    empty = sum(one.empty for one in found.values())
    typer.echo(f"{len(found):,} continuations of {len(items):,} prompts, {empty:,} of them empty: {path}")


def _commands() -> "dict[str, Benchmark]":
    """Benchmarks by the name of their command; where several share one, the last has it."""
    from fairhead.language.benchmarks import all_benchmarks

    found = all_benchmarks()
    owners = {benchmark.flag: benchmark for benchmark in found}
    return {b.flag if owners[b.flag] is b else b.name: b for b in found}


def _suite_command() -> Callable[..., None]:
    """The command of the suite, with the options of all benchmarks."""
    names = ", ".join(dict.fromkeys(benchmark.flag for benchmark in _commands().values()))

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
        model: folder of a causal language model, or a hub name in the local cache (hub:NAME downloads it).
        data: folder with one folder for each benchmark, as published.
        out: folder for journals, tables of items and figures.
        only: benchmarks, separated by commas: {names}.
        limit: use only this many items of each benchmark, drawn at random with --seed.
        text: a text file for perplexity and attention entropy, instead of BOLD's Wikipedia texts.
        documents: number of documents drawn from that text; attention entropy uses 200 of them.
        bold_batch_size: batch size for BOLD's prompts.
    """

    takes = {"context": typer.Context, "chosen": Suite, "of": _options_of_all()}
    return options("lm", takes=takes | {"computing": Computing, "statistics": Statistics})(_run_suite)


def _options_of_all() -> type:
    """The options of all benchmarks in one class; those that only change what is shown are left out."""
    from fairhead.language.benchmark import SHOWS

    found: dict[str, tuple[str, Any, Any]] = {}
    lines = []
    for benchmark in _commands().values():
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
    """Run every benchmark on a model and write one folder, which `lm compare` can compare with another."""
    from fairhead.language.running import gather_items, run_suite

    how = statistics.resampling()
    names = tuple(name.strip() for name in (chosen.only or "").split(",") if name.strip())
    drawn = {"limit": chosen.limit, "seed": how.seed, "text": chosen.text, "documents": chosen.documents}
    # The data first: a mistake there should not wait for the model.
    items = gather_items(chosen.data, names, **drawn, **vars(of))
    if is_first():
        context.with_resource(locked(chosen.out))
    scorer = _load_model(chosen.model, computing)
    made = {"command": command_line(context), "data_path": str(chosen.data), "device": str(scorer.device)}
    with progress() as bars:
        sampling = Sampling(batch_size=chosen.bold_batch_size)
        suite = run_suite(scorer, items, chosen.out, chosen.model, how, sampling, bars.tell, made)
    from fairhead.report import write

    write(suite.page(), chosen.out / "report.html")
    suite.show()
    typer.echo(f"report: {chosen.out / 'report.html'}")


def _load_model(path: str, computing: Computing) -> "Scorer":
    """A scorer of a model; with several processes it is the first's, and the others work for it and end here."""
    need()
    from fairhead.language.loading import load_scorer, shared

    found: Scorer = shared(load_scorer(path, **vars(computing)))
    return found
