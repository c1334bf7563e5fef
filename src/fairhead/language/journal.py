"""A JSONL file to which a run adds what it has made, and from which it goes on after it was killed."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from fairhead.errors import InputError


@dataclass
class LineJournal(ABC):
    """A file of lines, one for each result, the first of which says which model and settings made them.

    A last line that was cut off by a crash is dropped. A kind of result is a subclass that names its `schema`, says
    `what` the lines hold and takes them up (`take`).

    Args:
        path: the file; made with its folder if it is not there.
        settings: whatever a result depends on besides its texts. A file of other settings is refused.
    """

    schema: ClassVar[str]
    what: ClassVar[str]

    path: Path
    settings: Mapping[str, Any]

    @abstractmethod
    def take(self, row: Mapping[str, Any]) -> None:
        """Take up a line of the file."""

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            end = self._read() if self.path.exists() else 0
            self._file = open(self.path, "ab")
            if self._file.tell() > end:
                self._file.truncate(end)
        except OSError as error:
            raise InputError(f"{self.path} cannot be written: {error.strerror or error}") from None
        if end == 0:
            self.write([{"schema": self.schema, "settings": dict(self.settings)}])
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add lines; they are on disk when this returns."""
        for line in lines:
            self._file.write(json.dumps(line, ensure_ascii=False).encode(errors="surrogatepass") + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self) -> int:
        """Take up the lines that are whole; return where they end."""
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
            try:
                row = json.loads(line.decode(errors="surrogatepass"))
                if number == 1:
                    self._check(row)
                else:
                    self.take(row)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if isinstance(error, InputError):
                    raise
                raise InputError(f"{self.path}, line {number}: is not a line of {self.what}; remove the file") from None
        return len(whole)

    def _check(self, header: Mapping[str, Any]) -> None:
        if header.get("schema") != self.schema:
            raise InputError(f"{self.path}: is not a file of {self.what} ({self.schema}); choose another name")
        there, ours = header["settings"], json.loads(json.dumps(dict(self.settings)))
        differing = sorted(k for k in {*there, *ours} if there.get(k) != ours.get(k))
        if differing:
            key = differing[0]
            raise InputError(
                f"{self.path}: its {self.what} were made with {key} {there.get(key)!r}, not {ours.get(key)!r}; "
                "remove the file or choose another name"
            )
