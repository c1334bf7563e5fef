"""How every command is told which column of a user's own data is what."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from fairhead.settings import Option


@dataclass(frozen=True)
class SentenceColumns:
    """Which column of own pairs or triplets of sentences is what, as it is called in the file.

    Attributes:
        group: column of the category, the kind of bias that a row is about.
        id: column of distinct ids; rows are numbered where there is none.
        data_option: another option of the reader: more=COLUMN, less=COLUMN, on_error=skip, ...
    """

    panel: ClassVar[str] = "Data"
    group: Annotated[tuple[str, ...], Option(metavar="COLUMN")] = ()
    id: Annotated[str | None, Option(metavar="COLUMN")] = None
    data_option: Annotated[Mapping[str, Any], Option(metavar="KEY=VALUE")] = field(default_factory=dict)

    @property
    def first_group(self) -> str | None:
        """The first column of groups, if any is named."""
        return self.group[0] if self.group else None

    def options(self, data: str) -> dict[str, Any]:
        """The options of the reader that `name:path` names.

        A reader whose groups cannot be chosen is not told them; whoever asks for one looks whether it is there.

        Example:
            >>> DataColumns(label="Smiling", data_option={"seed": 3}).options("celeba:CelebA")
            {'target': 'Smiling', 'seed': 3}
        """
        if self == type(self)():
            return {}
        from fairhead.data import parse_spec

        reader = parse_spec(data).reader
        named = {name: getattr(self, name, None) for name in ("label", "split", "id", "person")}
        if {"groups", "category"} & {*reader.options}:
            named["groups"] = self.group
        return {**reader.named(named), **self.data_option}


@dataclass(frozen=True)
class DataColumns(SentenceColumns):
    """Which column of own pictures or texts is what, as it is called in the file; published data have some of these.

    Attributes:
        group: column to audit by, which training never sees; give it several times for several.
        id: column of distinct ids; rows are numbered where there is none.
        data_option: another option of the reader: input=COLUMN of paths or texts, on_error=skip, ...
        label: column of the classes.
        split: column of the parts (train, val, test); drawn at random where there is none.
        person: column of the person or document, none of which is to be in two parts.
    """

    label: Annotated[str | None, Option(metavar="COLUMN")] = None
    split: Annotated[str | None, Option(metavar="COLUMN")] = None
    person: Annotated[str | None, Option(metavar="COLUMN")] = None
