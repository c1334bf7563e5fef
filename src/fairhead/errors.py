"""The errors that users see.

Each message says what was found, what was expected and what to do. The command line prints the message alone
and exits with code 2; from Python they are ordinary exceptions.
"""

from collections.abc import Collection


class FairheadError(Exception):
    """Base of every error that fairhead raises on purpose.

    Example:
        >>> from fairhead.errors import FairheadError, InputError
        >>> issubclass(InputError, FairheadError)
        True
    """


class InputError(FairheadError, ValueError):
    """The data, a file or an option is not what was expected.

    Example:
        >>> from fairhead.records import Records
        >>> Records.from_arrays([0, 1], [0, 2])
        Traceback (most recent call last):
        ...
        fairhead.errors.InputError: prediction holds 2, which is not among the classes 0, 1 of label; make the two \
columns agree, or name all classes (--class, once for each; classes=[...])
    """


class UnsupportedModel(FairheadError):
    """A model family cannot do what was asked; the message names the family and what it can do.

    Example:
        >>> issubclass(UnsupportedModel, FairheadError)
        True
    """


def check_known(name: str, known: Collection[str], says: str) -> None:
    """Refuse a name that is not known, with what there is and the nearest of it.

    Example:
        >>> check_known("lable", ["label", "race"], "there is no column 'lable'; there are")
        Traceback (most recent call last):
        fairhead.errors.InputError: there is no column 'lable'; there are label, race. Did you mean 'label'?
    """
    if name not in known:
        raise InputError(f"{says} {', '.join(known) or 'none'}.{did_you_mean(name, list(known))}")


def did_you_mean(name: str, known: "list[str] | tuple[str, ...]") -> str:
    """Return `` Did you mean 'x'?`` for the nearest known name, or an empty string.

    Example:
        >>> did_you_mean("lable", ["label", "race"]), did_you_mean("EOD", ["EOp", "EOd"])
        (" Did you mean 'label'?", " Did you mean 'EOd'?")
        >>> did_you_mean("lr", ["lora", "learning_rate"]), did_you_mean("dp", ["DP_pairwise", "DP"])
        (" Did you mean 'learning_rate'?", " Did you mean 'DP'?")
    """
    from difflib import get_close_matches

    given, by_lower = name.lower(), {other.lower(): other for other in reversed(known)}
    by_initials = {"".join(word[:1] for word in other.split("_")): other for other in by_lower if "_" in other}
    near = [given] if given in by_lower else [by_initials[given]] if given in by_initials else []
    near = near or get_close_matches(given, list(by_lower), n=1)
    return f" Did you mean {by_lower[near[0]]!r}?" if near else ""
