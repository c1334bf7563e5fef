"""`fairhead lm …`: one command a benchmark, made of what the benchmark says of itself."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from typer.core import TyperGroup

from fairhead.cli.common import SentenceColumns, check_output, command_line, is_first, progress, write_json
from fairhead.cli.lm_suites import EPILOG as COMPARE_EPILOG
from fairhead.cli.lm_suites import (
    Computing,
    Statistics,
    commands,
    compare_command,
    load_model,
    suite_command,
    suite_epilog,
)
from fairhead.cli.options import options, single_command
from fairhead.errors import InputError
from fairhead.language.answers import Progress, Sampling, read_generations
from fairhead.settings import Count, Option
from fairhead.store import locked

if TYPE_CHECKING:
    from fairhead.language.benchmark import Benchmark

_GOES_ON = """
With `--out`, answers are written as they are made, and a run that was killed goes on where it stopped: give the same
command again. The folder is that of a suite (`fairhead lm suite`), and can be compared (`fairhead lm compare`).

With several GPUs, `accelerate launch --num_processes 4 -m fairhead lm ...` divides the texts among them; a model that
is too large for one GPU is spread over them by `--device-map auto`. An 8B model (Llama 3.1) in bfloat16 takes 20 GB
(`fairhead.language.row_layout.scoring_memory` works it out), 12 GB with `--load-in 8bit`.
"""
_ELSEWHERE = """
A model can write on one machine and be measured on another:

    fairhead lm {0} --model SmolLM2-135M --data {0} --generate-only --out runs

    fairhead lm {0} --data {0} --score-only runs/journals/{0}-1a2b3c4d.jsonl --json {0}.json
"""


@dataclass(frozen=True)
class Source:
    """What is measured on what.

    Attributes:
        data: file, folder or zip archive as published, or reader:path.
        model: folder of a causal language model, or its name on the hub if it is cached (hub:NAME fetches it).
        limit: only so many items, drawn at random with --seed.
    """

    data: Annotated[str, Option(metavar="PATH")]
    model: Annotated[str, Option(metavar="PATH")]
    limit: Annotated[Count | None, Option(metavar="N")] = None


@dataclass(frozen=True)
class Written(Source):
    """What is measured on what, where a model writes.

    Attributes:
        score_only: measure this file of generations; no model is needed.
        generate_only: write generations, measure nothing.
    """

    model: Annotated[str | None, Option(metavar="PATH")] = None  # type: ignore[assignment]
    score_only: Annotated[str | None, Option(metavar="FILE")] = None
    generate_only: bool = False


@dataclass(frozen=True)
class Output:
    """What is written.

    Attributes:
        json: write JSON; - prints only JSON.
        out: folder for the answers, the table of items and the figures.
        html: write a report, and its JSON twin.
    """

    panel: ClassVar[str] = "Output"
    json: Annotated[str | None, Option(metavar="FILE")] = None
    out: Annotated[Path | None, Option(metavar="DIR")] = None
    html: Annotated[Path | None, Option(metavar="FILE")] = None

    def check(self) -> None:
        """Refuse what cannot be written before anything is computed."""
        for path in (self.json, None if self.html is None else str(self.html)):
            check_output(path)
        if self.html is not None and self.json is not None and Path(self.json) == self.html.with_suffix(".json"):
            raise InputError(f"--json {self.json} is where the report's own JSON twin goes: choose another name")


class _Benchmarks(TyperGroup):
    """Makes the command of a benchmark when it is asked for, so that other commands need not import any."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*commands(), "suite", *self.commands]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        known = super().get_command(ctx, cmd_name)
        if known is not None:
            return known
        if cmd_name == "suite":
            return single_command("suite", suite_epilog(), suite_command())
        benchmark = commands().get(cmd_name)
        return None if benchmark is None else single_command(cmd_name, _epilog(benchmark), _command(benchmark))


lm_app = typer.Typer(
    name="lm",
    cls=_Benchmarks,
    help="Measure stereotypes in causal language models, with intervals.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
lm_app.command("compare", epilog=COMPARE_EPILOG)(compare_command)


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
    takes |= {"statistics": Statistics, "output": Output}
    left_out = []
    if benchmark.prompts or benchmark.section == "Attention":
        left_out += ["batch_tokens", "convention"]
    if not benchmark.prompts and not benchmark.requests:
        left_out.append("chat")

    def run(context: typer.Context, **given: Any) -> None:
        _run(context, benchmark, **given)

    run.__doc__ = benchmark.question
    return options("lm", {"computing": left_out, "output": () if benchmark.report else ("html",)}, takes)(run)


def _run(
    context: typer.Context,
    benchmark: "Benchmark",
    source: Any,
    own: Any,
    computing: Computing,
    statistics: Statistics,
    output: Output,
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
    items = read_data(benchmark, source.data, own, source.limit, how.seed, named, source.model)
    generate_only, score_only = (getattr(source, name, None) for name in ("generate_only", "score_only"))
    if not generate_only:
        benchmark.ready(own)
    if output.out is not None and is_first():
        context.with_resource(locked(output.out))
    stored = None if score_only is None else read_generations(Path(score_only))
    scorer = None if source.model is None else load_model(source.model, computing)
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
    if output.html is not None and benchmark.report is not None:
        from fairhead.report import write

        write(benchmark.report(result, Path(source.model).name, how.level), output.html)
    if output.json != "-":
        result.show()


def _check_written(source: Written, output: Output) -> None:
    if source.score_only is not None and (source.generate_only or source.model is not None):
        raise InputError("--score-only takes stored generations: give neither --model nor --generate-only with it")
    if source.score_only is None and source.model is None:
        raise InputError("a model is expected (--model PATH), or stored generations (--score-only FILE)")
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
