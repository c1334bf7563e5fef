"""Commands whose options are made from settings dataclasses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
import typer
from typer.testing import CliRunner

from fairhead.cli.options import options
from fairhead.errors import InputError
from fairhead.settings import PYTHON_ONLY, Count, Option, Share


@dataclass(frozen=True)
class Everything:
    """Settings of every type.

    Attributes:
        name: whom it is for.
        count: how many
            there are.
        share: part of them.
        rank: what they are ranked by.
        groups: columns, each once.
        limit: at most so many.
        loud: say more.
        quick: leave nothing out unless this is off.
        folder: where to.
        extra: of the method.
        hidden: of no concern to the command line.
    """

    panel: ClassVar[str] = "Everything"

    name: str
    count: Count = 4
    share: Annotated[Share, Option("--part", metavar="SHARE")] = 0.5
    rank: Literal["gap", "effect"] = "gap"
    groups: tuple[str, ...] = ()
    limit: Count | None = None
    loud: bool = False
    quick: bool = True
    folder: Path = Path("out")
    extra: Mapping[str, Any] = field(default_factory=dict)
    hidden: Annotated[int, PYTHON_ONLY] = 7


@pytest.fixture
def app():
    made = typer.Typer(rich_markup_mode=None)
    seen = []

    @made.command()
    @options("try")
    def run(word: str, settings: Everything) -> None:
        """Run it."""
        seen.append((word, settings))

    made.seen = seen
    return made


def run(app, *arguments):
    app(list(arguments), standalone_mode=False)
    return app.seen.pop()


def test_defaults_are_those_of_the_class(app):
    assert run(app, "w", "--name", "x") == ("w", Everything("x"))


def test_every_type_is_read(app):
    given = [
        *("--name", "x", "--count", "9", "--part", "0.25", "--rank", "effect", "--groups", "a", "--groups", "b"),
        *("--limit", "3", "--loud", "--no-quick", "--folder", "there", "--extra", "lr=1e-4", "--extra", "k=[1, 2]"),
    ]
    expected = Everything("x", 9, 0.25, "effect", ("a", "b"), 3, True, False, Path("there"), {"lr": 1e-4, "k": [1, 2]})
    assert run(app, "w", *given) == ("w", expected)


def test_help_is_the_docstring_of_the_class(app):
    text = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    assert "How many there are." in text
    assert "--part SHARE" in text
    assert "gap|effect" in text
    assert "hidden" not in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--count", "0"], "--count is 0; expected a whole number of at least 1"),
        (["--part", "2"], "--part is 2.0; expected a number from 0 to 1"),
        (["--part", "nan"], "--part is nan; expected a number from 0 to 1"),
        (["--extra", "lr"], "--extra takes key=value; found 'lr'"),
    ],
)
def test_ranges_are_those_of_the_class_and_errors_name_the_flag(app, given, message):
    with pytest.raises(InputError) as error:
        run(app, "w", "--name", "x", *given)
    assert str(error.value) == message


def test_options_are_environment_variables(app, monkeypatch):
    monkeypatch.setenv("FAIRHEAD_TRY_PART", "0.125")
    monkeypatch.setenv("FAIRHEAD_TRY_COUNT", "8")
    _, settings = run(app, "w", "--name", "x")
    assert (settings.share, settings.count) == (0.125, 8)


def test_a_command_can_leave_out_settings_which_then_keep_their_defaults():
    made, seen = typer.Typer(rich_markup_mode=None), []

    @made.command()
    @options("try", without={"settings": ("count", "rank")})
    def run(settings: Everything, count: str = "none") -> None:
        """Run it, with a --count of its own."""
        seen.append((settings, count))

    made(["--name", "x", "--count", "many"], standalone_mode=False)
    assert seen == [(Everything("x"), "many")]
    assert "--rank" not in CliRunner().invoke(made, ["--help"]).output
