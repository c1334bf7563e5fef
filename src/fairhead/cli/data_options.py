"""How every command is told which column of a user's own data is what."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from fairhead.settings import Option


@dataclass(frozen=True)
class DataColumns:
    """Which column is what, as they are called in the file; published data sets take those that they have.

    Attributes:
        label: column of the classes.
        group: column to audit by, which training never sees; of pairs and triplets the category. May be repeated.
        split: column of the parts (train, val, test); drawn at random where there is none.
        id: column of distinct ids; rows are numbered where there is none.
        person: column of the person or document, none of which is to be in two parts.
        data_option: another option of the reader: input=COLUMN of paths or texts, on_error=skip, ...
    """

    panel: ClassVar[str] = "Data"
    label: Annotated[str | None, Option(metavar="COLUMN")] = None
    group: Annotated[tuple[str, ...], Option(metavar="COLUMN")] = ()
    split: Annotated[str | None, Option(metavar="COLUMN")] = None
    id: Annotated[str | None, Option(metavar="COLUMN")] = None
    person: Annotated[str | None, Option(metavar="COLUMN")] = None
    data_option: Annotated[Mapping[str, Any], Option(metavar="KEY=VALUE")] = field(default_factory=dict)

    @property
    def first_group(self) -> str | None:
        """The first column to audit by, if any is named."""
        return self.group[0] if self.group else None

    def options(self, data: str) -> dict[str, Any]:
        """The options of the reader that `name:path` names.

        A reader whose groups cannot be chosen is not told them; whoever asks for one looks whether it is there.

        Example:
            >>> DataColumns(label="Smiling", data_option={"seed": 3}).options("celeba:CelebA")
            {'target': 'Smiling', 'seed': 3}
        """
        from fairhead.data import parse_spec

        reader = parse_spec(data).reader
        named: dict[str, Any] = {"label": self.label, "split": self.split, "id": self.id, "person": self.person}
        if {"groups", "category"} & {*reader.options}:
            named["groups"] = self.group
        return {**reader.named(named), **self.data_option}
