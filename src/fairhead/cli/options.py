"""Options of commands, made from settings dataclasses: one place says what a setting is called, means and allows."""

import enum
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass, replace
from keyword import iskeyword
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import typer

from fairhead.errors import InputError
from fairhead.settings import Option, check_settings
from fairhead.store import yaml_value


def options(
    command: str, without: Mapping[str, Collection[str]] | None = None, takes: Mapping[str, Any] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a command take settings: each parameter that is annotated with a settings dataclass becomes its options.

    The command is called with an instance of each class, whose values have been held to their types and ranges. An
    instance as the parameter's default has the defaults of its options. All other parameters are typer's as usual.
    Every option is also the environment variable FAIRHEAD_<COMMAND>_<OPTION>.

    Args:
        command: its name, for the environment variables: "locate", "lm".
        without: parameter -> fields of its settings that are not offered, and keep their defaults.
        takes: the parameters of a command that is made when it is asked for, and their types, or instances of settings
            that have the defaults.

    Example:
        Where `Drawing` is a dataclass with `draws: Count = 200`, a command `show(drawing: Drawing)` has an option
        --draws of at least 1. Its help is what the docstring of `Drawing` says of the attribute `draws`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        settings: dict[str, tuple[Any, list[_Offered]]] = {}
        parameters: list[inspect.Parameter] = []
        for parameter in _parameters(function) if takes is None else map(_parameter, takes, takes.values()):
            kind = parameter.annotation
            if isinstance(kind, type) and is_dataclass(kind):
                instance = None if parameter.default is parameter.empty else parameter.default
                left_out = (without or {}).get(parameter.name, ())
                offered = [one for one in _offered(kind, instance) if one.name not in left_out]
                settings[parameter.name] = instance or kind, offered
                parameters += [made for one in offered for made in one.parameters(command)]
            else:
                parameters.append(parameter)

        def called(**given: Any) -> Any:
            built = {name: _built(kind, offered, given) for name, (kind, offered) in settings.items()}
            return function(**given, **built)

        parameters.sort(key=lambda p: p.default is not p.empty)  # required ones first
        signature = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in parameters])
        vars(called).update(__signature__=signature)
        called.__annotations__ = {p.name: p.annotation for p in parameters}
        called.__doc__, called.__name__ = function.__doc__, function.__name__
        return called

    return decorate


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(function, include_extras=True)
    return [one.replace(annotation=hints[one.name]) for one in inspect.signature(function).parameters.values()]


def _parameter(name: str, kind: Any) -> inspect.Parameter:
    if is_dataclass(kind) and not isinstance(kind, type):
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=kind, annotation=type(kind))
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind)


def single_command(name: str, epilog: str, function: Callable[..., Any]) -> Any:
    """A command that is made when it is asked for."""
    app = typer.Typer(rich_markup_mode="markdown", add_completion=False)
    app.command(name, epilog=epilog)(function)
    return typer.main.get_command(app)


class _Offered(NamedTuple):
    """A field of a settings class that the command line offers."""

    name: str
    hint: Any
    option: Option
    default: Any  # MISSING where something must be given
    help: str
    panel: str | None

    @property
    def key(self) -> str:
        """The name of its parameter: fields of two classes may be called alike, flags may not."""
        name = self.flag.strip("-").replace("-", "_")
        return f"{name}_" if iskeyword(name) else name

    @property
    def flag(self) -> str:
        """What is typed."""
        return self.option.flag or f"--{self.name.replace('_', '-')}"

    def parameters(self, command: str) -> list[inspect.Parameter]:
        """The parameter that typer reads, and a hidden one for another flag."""
        kind, default = _typer_type(self.hint, self.name), self.default
        # One word for a setting that is off unless asked for, two where the default is on.
        flags = f"{self.flag}/--no-{self.flag.strip('-')}" if kind is bool and default else self.flag
        if isinstance(default, tuple | Mapping):
            default = list(default) or None
        found = []
        for key, flag in ((self.key, flags), (f"{self.key}_also", self.option.also)):
            if flag:
                option = typer.Option(
                    flag,
                    help=self.help,
                    metavar=self.option.metavar,
                    rich_help_panel=self.panel,
                    hidden=self.option.hidden or flag == self.option.also,
                    envvar=f"FAIRHEAD_{command}_{flag.partition('/')[0].strip('-')}".replace("-", "_").upper(),
                    show_envvar=False,
                )
                parameter = _parameter(key, Annotated[kind if default is not None else kind | None, option])
                found.append(parameter if default is MISSING else parameter.replace(default=default))
        return found

    def take(self, given: dict[str, Any]) -> Any:
        """Its value for the settings class, taken from what typer parsed."""
        value = given.pop(self.key)
        if self.option.also:
            other = given.pop(f"{self.key}_also")
            if None not in (value, other):
                raise InputError(f"{self.flag} and {self.option.also} are the same option; give one of them")
            value = value if other is None else other
        several, kind = _shape(self.hint)
        if several is dict:
            return key_values(value, self.flag)
        if several is list and value is not None and kind in (int, float):
            try:  # each on its own or several with commas: `--layers 0,5 --layers=-1`
                return tuple(kind(part) for text in value for part in str(text).split(",") if part.strip())
            except ValueError:
                found = ",".join(value)
                raise InputError(f"{self.flag} is {found!r}; expected numbers with commas, such as 0,5,-1") from None
        if several is list:
            return tuple(value or ())
        return value.value if isinstance(value, enum.Enum) else value


def _offered(settings: type, instance: Any = None) -> list[_Offered]:
    """The fields of a settings class that are offered; the defaults are those of an instance, where there is one."""
    hints, texts = get_type_hints(settings, include_extras=True), attribute_texts(settings)
    found = []
    for field in fields(settings):
        option = next((extra for extra in get_args(hints[field.name])[1:] if isinstance(extra, Option)), Option())
        if option.shown:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            default = default if instance is None else getattr(instance, field.name)
            panel = option.panel or getattr(settings, "panel", None)
            found.append(_Offered(field.name, hints[field.name], option, default, texts.get(field.name, ""), panel))
    return found


def parameter_names(settings: type) -> dict[str, str]:
    """The fields of a settings class that are offered, and how typer calls their parameters."""
    return {one.name: one.key for one in _offered(settings)}


def attribute_texts(settings: type) -> dict[str, str]:
    """What the docstring of a class says of each attribute, as sentences."""
    found: dict[str, str] = {}
    for base in reversed(settings.__mro__):  # its own words come last, and count
        _, _, listed = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
        block = listed.partition("\n\n")[0]
        found |= re.findall(r"^    (\w+): ((?:.*)(?:\n        .*)*)", block, flags=re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in found.items()}
    return {name: text[:1].upper() + text[1:] if text[:1].isascii() else text for name, text in texts.items()}


def _built(kind: Any, offered: Sequence[_Offered], given: dict[str, Any]) -> Any:
    """The settings, taken out of what was given, with errors that name the flag."""
    values = {}
    for one in offered:
        value = values[one.name] = one.take(given)
        try:
            if value != one.default:
                check_settings(kind if isinstance(kind, type) else type(kind), {one.name: value}, "")
        except InputError as error:
            raise InputError(f"{one.flag} {str(error).partition(f': {one.name} ')[2]}") from None
    return kind(**values) if isinstance(kind, type) else replace(kind, **values)


def key_values(given: Sequence[str] | None, flag: str) -> dict[str, Any]:
    """The values of "key=value" options, read as YAML.

    Example:
        >>> key_values(["values=4", "lr=1e-4", "counts=[2, 3]"], "--option")
        {'values': 4, 'lr': 0.0001, 'counts': [2, 3]}
    """
    found = {}
    for pair in given or []:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise InputError(f"{flag} takes key=value; found {pair!r}")
        try:
            value = yaml_value(text)
        except ValueError:
            raise InputError(f"{flag} {key}: {text!r} is not a value that YAML can read") from None
        # YAML wants a point in 1e-4 to take it for a number.
        if isinstance(value, str):
            with suppress(ValueError):
                value = float(value)
        found[key] = value
    return found


def _typer_type(hint: Any, name: str) -> Any:
    """The type of a setting as typer knows it: without ranges, choices as an enum, several values as a list."""
    several, kind = _shape(hint)
    if several is not None:
        # Numbers may also be given at once, with commas.
        inner = str if kind in (int, float) else _typer_type(kind, name)
        return list[inner]  # type: ignore[valid-type]
    if get_origin(kind) is Literal:
        return enum.StrEnum(name, {str(one): str(one) for one in get_args(kind)})
    return kind if kind in (str, int, float, bool, Path) else str


def _shape(hint: Any) -> tuple[type | None, Any]:
    """Whether a setting holds several values, as a list or a dict, and the type of each."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _shape(arguments[0])
    if origin in (Union, UnionType):
        return _shape(next(one for one in arguments if one is not NoneType))
    if origin is Mapping:
        return dict, str
    return (list, _shape(arguments[0])[1]) if origin in (tuple, Sequence) else (None, hint)
