"""What single heads look at: a card each, with its figures, texts and pictures."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from markupsafe import Markup

from fairhead.report.form import Head, Must, PictureAddress
from fairhead.report.markup import fill
from fairhead.report.sections import Section
from fairhead.report.sections.ablated import Fact
from fairhead.report.wording import Scale, head_name

_Poles = Annotated[
    Sequence[str], Must(lambda x: isinstance(x, list) and len(x) == 2, "is {value!r}; expected two names")
]


@dataclass(frozen=True, kw_only=True)
class SpanText:
    """A text that spans what a head writes: its share of the variance, and whether it names the attribute."""

    text: str
    share: float
    attribute: bool


@dataclass(frozen=True, kw_only=True)
class HeadCard:
    """One head; `most` and `least` are pictures at the two ends of its axis."""

    head: Head
    facts: Sequence[Fact]
    texts: Sequence[SpanText] = ()
    most: Sequence[PictureAddress] = ()
    least: Sequence[PictureAddress] = ()


@dataclass(frozen=True, kw_only=True)
class TopHeads(Section):
    """A card for each head; `poles` name the two ends of their axes."""

    kind: ClassVar[str] = "top_heads"

    poles: _Poles
    heads: Sequence[HeadCard]
    others: Sequence[HeadCard] = ()  # shown one at a time, when their head is clicked in a map

    def draw(self) -> Markup:
        """The cards."""
        first, second = (f"most {pole}" for pole in self.poles)
        both = [(card, False) for card in self.heads] + [(card, True) for card in self.others]
        cards = [(card, ((first, card.most), (second, card.least)), other) for card, other in both]
        return fill("top_heads.html", cards=cards, head_name=head_name, percent=Scale(100, 1, "%").write)
