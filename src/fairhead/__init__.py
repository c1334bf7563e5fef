"""fairhead finds, proves and reduces demographic bias in transformers, at the attention heads where it sits.

The verbs are **audit** (how large is a gap, how certain is it), **discover** (find groups without labels), **locate**
(which heads contribute to a gap) and **mitigate** (train a better model); **predict** and **score** run a model.
Everything reads and writes one table, `Records`, and every verb returns a result with `show`, `to_dict`, `to_frame` and
`report`. Names are imported on first use, so an audit never loads torch.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pkgutil import resolve_name
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from fairhead.errors import InputError, check_known

if TYPE_CHECKING:
    from fairhead.audit import audit as audit
    from fairhead.audit import compare as compare
    from fairhead.callback import AuditCallback as AuditCallback
    from fairhead.data import dataset as dataset
    from fairhead.errors import FairheadError as FairheadError
    from fairhead.heads import tap as tap
    from fairhead.mitigate import DAM as DAM
    from fairhead.mitigate import KLAAD as KLAAD
    from fairhead.models import attach as attach
    from fairhead.models.load import load as load
    from fairhead.records import Records as Records
    from fairhead.verbs import discover as discover
    from fairhead.verbs import locate as locate
    from fairhead.verbs import mitigate as mitigate
    from fairhead.verbs import predict as predict
    from fairhead.verbs import score as score

T = TypeVar("T")

try:
    __version__ = version("fairhead")  # that of the latest git tag
except PackageNotFoundError:  # the source alone, not installed
    __version__ = "0+unknown"

# Public name -> the module that defines it.
_PUBLIC = {
    "AuditCallback": "fairhead.callback",
    "DAM": "fairhead.mitigate",
    "FairheadError": "fairhead.errors",
    "KLAAD": "fairhead.mitigate",
    "Records": "fairhead.records",
    "attach": "fairhead.models",
    "audit": "fairhead.audit",
    "compare": "fairhead.audit",
    "dataset": "fairhead.data",
    "discover": "fairhead.verbs",
    "load": "fairhead.models",
    "locate": "fairhead.verbs",
    "mitigate": "fairhead.verbs",
    "predict": "fairhead.verbs",
    "score": "fairhead.verbs",
    "tap": "fairhead.heads",
}

_PACKAGES = ("audit", "discover", "locate", "mitigate")  # each a `_Verb`

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fairhead' has no attribute {name!r}")
    try:
        value = getattr(import_module(_PUBLIC[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers", "accelerate"):
            raise
        message = f'fairhead.{name} needs {error.name}, which is not installed: pip install "fairhead[torch]"'
        raise ModuleNotFoundError(message, name=error.name) from None
    if name in _PACKAGES:  # as importing any part of it would have it: with all that is in it, such as `audit.drift`
        value = import_module(f"fairhead.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Verb(ModuleType):
    """A package that is also a verb, such as `fairhead.audit` and `fairhead.audit(records)`.

    Importing any submodule binds the package to its name in `fairhead`, whatever was bound there before. With a package
    that can be called, both readings of the name work in every order of imports.
    """

    @property
    def _function(self) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module(_PUBLIC[name]), name)

    @property
    def __signature__(self) -> Any:
        from inspect import signature

        return signature(self._function)

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        return str(self._function.__doc__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def later(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names are imported when first used: name -> the module that defines it."""

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return get


def make_verb(package: str) -> None:
    """Let a package be called as the verb of its name."""
    sys.modules[package].__class__ = _Verb


def added(group: str) -> dict[str, EntryPoint]:
    """What other packages add to fairhead: the entry points of a group by name."""
    return {point.name: point for point in entry_points(group=group)}


def registered(name: str, place: str, kind: type[T]) -> T:
    """What a registry, or an entry point, names as "module:object": one of this kind, called so."""
    try:
        found: Any = resolve_name(place)
    except (ImportError, AttributeError) as error:
        what = kind.__name__.lower().removesuffix("entry")
        raise InputError(f"the {what} {name!r} cannot be imported from {place}: {error}") from error
    if not isinstance(found, kind) or getattr(found, "name", None) != name:
        raise InputError(f"{place} is not a {kind.__name__} called {name!r}, as its registration says")
    return found


def entry_named(name: str, own: Mapping[str, T], group: str, kind: type[T], says: str) -> T:
    """What a registry has under a name: its own, or what another package adds to a group of entry points."""
    if name in own:
        return own[name]
    others = added(group)
    check_known(name, [*own, *others], says)
    return registered(name, others[name].value, kind)
