"""What is installed: fairhead's own version, and what other packages add to it by entry points."""

from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pkgutil import resolve_name
from typing import Any, TypeVar

from fairhead.errors import InputError

T = TypeVar("T")

try:
    __version__ = version("fairhead")  # that of the latest git tag
except PackageNotFoundError:  # the source alone, not installed
    __version__ = "0+unknown"


def added(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name."""
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
