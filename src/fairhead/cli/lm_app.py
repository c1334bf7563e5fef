"""`fairhead lm …`: one command a benchmark, and those that run or compare many of them."""

import inspect
from collections.abc import Callable
from typing import Any

import typer

from fairhead.cli.lm import EPILOG, Benchmark, lm_command
from fairhead.cli.lm_attention import EPILOG as ATTENTION_EPILOG
from fairhead.cli.lm_attention import attention_command
from fairhead.cli.lm_bold import EPILOG as BOLD_EPILOG
from fairhead.cli.lm_bold import bold_command
from fairhead.cli.lm_compare import EPILOG as COMPARE_EPILOG
from fairhead.cli.lm_compare import compare_command
from fairhead.cli.lm_suite import EPILOG as SUITE_EPILOG
from fairhead.cli.lm_suite import suite_command

lm_app = typer.Typer(
    name="lm",
    help="Measure stereotypes in causal language models, with intervals.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

_SAYS = {
    "stereoset": "Is a stereotype likelier than its opposite, and either than nonsense (ss, lms, icat)?",
    "crows": "Of two sentences that differ in the group, how often is the more stereotypical one likelier?",
    "bbq": "Accuracy and bias score of answers about two people, with and without the context that tells.",
    "winobias": "Is a sentence likelier with the pronoun that fits the stereotype of the occupation?",
    "perplexity": "Perplexity of a text file: the check that a change has not cost a model its language.",
}


def _command(benchmark: Benchmark) -> Callable[..., None]:
    """`lm_command` with its benchmark given: what typer reads are the signature and the annotations."""

    def run(**options: Any) -> None:
        lm_command(benchmark=benchmark, **options)

    parameters = [p for name, p in inspect.signature(lm_command).parameters.items() if name != "benchmark"]
    run.__dict__["__signature__"] = inspect.Signature(parameters, return_annotation=None)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = _SAYS.get(benchmark.value, lm_command.__doc__)
    return run


for _benchmark in Benchmark:
    lm_app.command(_benchmark.value, epilog=EPILOG)(_command(_benchmark))
lm_app.command("suite", epilog=SUITE_EPILOG)(suite_command)
lm_app.command("bold", epilog=BOLD_EPILOG)(bold_command)
lm_app.command("compare", epilog=COMPARE_EPILOG)(compare_command)
lm_app.command("attention", epilog=ATTENTION_EPILOG)(attention_command)
