"""Options of commands, made from settings dataclasses: one place says what a setting is called, means and allows."""

import enum
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from keyword import iskeyword
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

from fairhead.errors import InputError
from fairhead.settings import Option, check_settings
from fairhead.store import yaml_value

Command = TypeVar("Command", bound=Callable[..., Any])


def options(command: str, without: Mapping[str, Collection[str]] | None = None) -> Callable[[Command], Command]:
    """Let a command take settings: each parameter that is annotated with a settings dataclass becomes its options.

    The command is called with an instance of each class, whose values have been held to their types and ranges. An
    instance as the parameter's default has the defaults of its options. All other parameters are typer's as usual.
    Every option is also the environment variable FAIRHEAD_<COMMAND>_<OPTION>.

    Args:
        command: its name, for the environment variables: "locate", "lm".
        without: parameter -> fields of its settings that are not offered, and keep their defaults.

    Example:
        >>> from dataclasses import dataclass
        >>> from fairhead.settings import Count
        >>> @dataclass(frozen=True)
        ... class Drawing:
        ...     '''How sets are drawn.
        ...
        ...     Attributes:
        ...         draws: random sets.
        ...         seed: same seed, same figures.
        ...     '''
        ...     draws: Count = 200
        ...     seed: int = 0
        >>> def show(drawing: Drawing) -> None:
        ...     print(drawing)
        >>> app = typer.Typer()
        >>> _ = app.command()(options("show")(show))
        >>> app(["--draws", "5"], standalone_mode=False)
        Drawing(draws=5, seed=0)
        >>> app(["--draws", "0"], standalone_mode=False)
        Traceback (most recent call last):
        fairhead.errors.InputError: --draws is 0; expected a whole number of at least 1
    """

    def decorate(function: Command) -> Command:
        hints = get_type_hints(function, include_extras=True)
        settings: dict[str, tuple[_Offered, ...]] = {}
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(function).parameters.values():
            hint = hints[parameter.name]
            if isinstance(hint, type) and is_dataclass(hint):
                offered = _offered(hint, parameter.default)
                left_out = (without or {}).get(parameter.name, ())
                settings[parameter.name] = tuple(one for one in offered if one.field.name not in left_out)
                parameters += [made for one in settings[parameter.name] for made in one.parameters(command)]
            else:
                parameters.append(parameter.replace(annotation=hint))

        def called(**given: Any) -> Any:
            for one in (one for offered in settings.values() for one in offered if one.option.also):
                other = given.pop(f"{one.key}_also")
                if other is not None and given[one.key] is not None:
                    raise InputError(f"{one.flag} and {one.option.also} are the same option; give one of them")
                given[one.key] = given[one.key] if other is None else other
            built = {name: _built(hints[name], offered, given) for name, offered in settings.items()}
            taken = {one.key for offered in settings.values() for one in offered}
            return function(**{name: value for name, value in given.items() if name not in taken}, **built)

        parameters.sort(key=lambda p: p.default is not p.empty)  # required ones first
        signature = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in parameters])
        vars(called).update(__signature__=signature)
        called.__annotations__ = {p.name: p.annotation for p in parameters}
        called.__doc__, called.__name__ = function.__doc__, function.__name__
        return called  # type: ignore[return-value]

    return decorate


class _Offered(NamedTuple):
    """A field of a settings class that the command line offers."""

    field: "Field[Any]"
    hint: Any
    option: Option
    help: str
    panel: str | None
    instance: Any = None  # whose values are the defaults

    @property
    def key(self) -> str:
        """The name of its parameter: fields of two classes may be called alike, flags may not."""
        name = self.flag.strip("-").replace("-", "_")
        return f"{name}_" if iskeyword(name) else name

    @property
    def flag(self) -> str:
        """What is typed."""
        return self.option.flag or f"--{self.field.name.replace('_', '-')}"

    def parameters(self, command: str) -> list[inspect.Parameter]:
        """The parameter that typer reads, and a hidden one for another flag."""
        if not self.option.also:
            return [self.parameter(command)]
        made, variable = self.parameter(command), f"FAIRHEAD_{command}_{self.option.also.strip('-')}"
        hidden = typer.Option(self.option.also, hidden=True, envvar=variable.replace("-", "_").upper())
        kind = get_args(made.annotation)[0]
        return [made, made.replace(name=f"{self.key}_also", annotation=Annotated[kind, hidden])]

    def parameter(self, command: str) -> inspect.Parameter:
        """The parameter that typer reads."""
        variable = f"FAIRHEAD_{command}_{self.flag.strip('-')}".replace("-", "_").upper()
        kind, default = _typer_type(self.hint, self.field.name), self.default()
        # One word for a setting that is off unless asked for, two where the default is on.
        flags = f"{self.flag}/--no-{self.flag.strip('-')}" if kind is bool and default else self.flag
        option = typer.Option(
            flags,
            help=self.help,
            metavar=self.option.metavar,
            rich_help_panel=self.panel,
            hidden=self.option.hidden,
            envvar=variable,
            show_envvar=False,
        )
        if isinstance(default, tuple | Mapping):
            default = list(default) or None
        return inspect.Parameter(
            self.key,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is MISSING else default,
            annotation=Annotated[kind if default is not None else kind | None, option],
        )

    def default(self) -> Any:
        """What the settings class has where nothing is given; MISSING where something must be."""
        if self.instance is not None:
            return getattr(self.instance, self.field.name)
        if self.field.default_factory is not MISSING:
            return self.field.default_factory()
        return self.field.default


def _offered(settings: type, default: Any) -> tuple[_Offered, ...]:
    instance = default if isinstance(default, settings) else None
    hints = get_type_hints(settings, include_extras=True)
    texts = attribute_texts(settings)
    found = []
    for field in fields(settings):
        option = next((extra for extra in get_args(hints[field.name])[1:] if isinstance(extra, Option)), Option())
        if option.shown:
            panel = option.panel or getattr(settings, "panel", None)
            found.append(_Offered(field, hints[field.name], option, texts.get(field.name, ""), panel, instance))
    return tuple(found)


def parameter_names(settings: type) -> dict[str, str]:
    """The fields of a settings class that are offered, and how typer calls their parameters."""
    return {one.field.name: one.key for one in _offered(settings, None)}


def attribute_texts(settings: type) -> dict[str, str]:
    """What the docstring of a class says of each attribute, as sentences.

    Example:
        >>> class Drawing:
        ...     '''How sets are drawn.
        ...
        ...     Attributes:
        ...         draws: random sets; all
        ...             where there are fewer.
        ...         seed: of the draws.
        ...     '''
        >>> attribute_texts(Drawing)
        {'draws': 'Random sets; all where there are fewer.', 'seed': 'Of the draws.'}
    """
    found: dict[str, str] = {}
    for base in reversed(settings.__mro__):  # its own words come last, and count
        _, _, listed = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
        block = listed.partition("\n\n")[0]
        found |= re.findall(r"^    (\w+): ((?:.*)(?:\n        .*)*)", block, flags=re.MULTILINE)
    return {name: _sentence(" ".join(text.split())) for name, text in found.items()}


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] if text[:1].isascii() else text  # λ is not Λ


def _built(kind: Any, offered: Sequence[_Offered], given: Mapping[str, Any]) -> Any:
    """The settings, with errors that name the flag."""
    values = {}
    for one in offered:
        value = _plain(given[one.key], one)
        try:
            if value != one.default():
                check_settings(kind, {one.field.name: value}, "")
        except InputError as error:
            raise InputError(f"{one.flag} {str(error).partition(f': {one.field.name} ')[2]}") from None
        values[one.field.name] = value
    instance = offered[0].instance if offered else None
    return kind(**values) if instance is None else replace(instance, **values)


def _plain(value: Any, one: _Offered) -> Any:
    """A value as the settings class holds it, from what typer hands over."""
    if isinstance(value, enum.Enum):
        return value.value
    if _is_mapping(one.hint):
        return key_values(value, one.flag)
    if isinstance(value, list):
        return tuple(value) if _number_type(one.hint) is None else _numbers(value, one)
    return value if value is not None or not _is_list(one.hint) else ()


def _numbers(given: Sequence[str], one: _Offered) -> tuple[Any, ...]:
    """Numbers, each on its own or several with commas: `--layers 0,5 --layers=-1`."""
    kind = _number_type(one.hint)
    assert kind is not None
    try:
        return tuple(kind(part) for text in given for part in str(text).split(",") if part.strip())
    except ValueError:
        raise InputError(f"{one.flag} is {','.join(given)!r}; expected numbers with commas, such as 0,5,-1") from None


def _number_type(hint: Any) -> type | None:
    """Of a list of numbers: of which."""
    inner = [kind for one in _inside(hint) if _is_list(one) for kind in _inside(get_args(one)[0])]
    return inner[0] if inner and inner[0] in (int, float) else None


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
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _typer_type(arguments[0], name)
    if origin in (Union, UnionType):
        return _typer_type(next(one for one in arguments if one is not NoneType), name)
    if origin is Literal:
        return enum.StrEnum(name, {str(one): str(one) for one in arguments})
    if _is_mapping(hint):
        return list[str]
    if _is_list(hint):
        # Numbers may also be given at once, with commas.
        inner = _typer_type(arguments[0], name) if _number_type(hint) is None else str
        return list[inner]  # type: ignore[valid-type]
    return hint if hint in (str, int, float, bool, Path) else str


def _inside(hint: Any) -> list[Any]:
    """The types that a hint admits, without what is annotated to them."""
    if get_origin(hint) is Annotated:
        return _inside(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [inner for one in get_args(hint) for inner in _inside(one)]
    return [hint]


def _is_mapping(hint: Any) -> bool:
    return any(get_origin(one) is Mapping for one in _inside(hint))


def _is_list(hint: Any) -> bool:
    return any(get_origin(one) in (tuple, Sequence) for one in _inside(hint))
