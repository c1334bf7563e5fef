"""The errors that users see.

Each message says what was found, what was expected and what to do. The command line prints the message alone
and exits with code 2; from Python they are ordinary exceptions.
"""


class FairheadError(Exception):
    """Base of every error that fairhead raises on purpose.

    Example:
        >>> from fairhead.errors import FairheadError, InputError
        >>> issubclass(InputError, FairheadError)
        True
    """


class InputError(FairheadError, ValueError):
    """The data, a file or an option is not what was expected."""


class UnsupportedModel(FairheadError):
    """A model family cannot do what was asked; the message names the family and what it can do."""


def did_you_mean(name: str, known: "list[str] | tuple[str, ...]") -> str:
    """Return `` Did you mean 'x'?`` for the nearest known name, or an empty string.

    Example:
        >>> did_you_mean("lable", ["label", "race"])
        " Did you mean 'label'?"
    """
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
