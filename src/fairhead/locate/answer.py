"""What was located, as a result: it can be shown, written, and its edit saved as a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairhead import __version__
from fairhead.errors import InputError
from fairhead.locate.engine import Located
from fairhead.locate.engine import locate as find_heads
from fairhead.locate.located_report import report_of, show_located, to_dict
from fairhead.locate.question import OTHER_HALF, LocatePlan, half_sha256
from fairhead.locate.session import Opened, Source, open_question
from fairhead.report.page import Report
from fairhead.report.result import Result
from fairhead.report.wording import head_name

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class LocatedHeads(Result):
    """The heads that carry a gap, with the question that they answer.

    Attributes:
        located: maps, chosen heads, effects of editing them.
        opened: the question, and what saves an edit.
        kind: of the edit that is reported first, and saved.
        provenance: where model and rows come from.
    """

    located: Located
    opened: Opened
    kind: str
    provenance: Mapping[str, Any]

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """The chosen heads as (layer, head), the best first."""
        return tuple((int(layer), int(head)) for layer, head in self.located.ranked)

    def page(self, images: bool = True) -> Report:
        """The report, with or without the images at the ends of each head."""
        shown = self.opened.images if images else None
        made = report_of(self.located, self.provenance, images=shown, notes=self.opened.notes)
        return made if isinstance(made, Report) else Report.from_dict(made)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form of the head map."""
        return to_dict(self.located, self.provenance, self.opened.notes)

    def rows(self) -> list[dict[str, Any]]:
        """One row a head: its direct part in the gap of the reporting half."""
        found = self.located.head_map
        layers, heads = found.gap.shape
        return [
            {
                "layer": layer,
                "head": head,
                "name": head_name(layer, head),
                "gap": float(found.gap[layer, head]),
                "low": float(found.low[layer, head]),
                "high": float(found.high[layer, head]),
                "p_adjusted": float(found.p_adjusted[layer, head]),
                "selected": (layer, head) in self.heads,
            }
            for layer in range(layers)
            for head in range(heads)
        ]

    def show(self, console: "Console | None" = None) -> None:
        """Print the verdict, the chosen heads and what editing them does."""
        from fairhead.report.console import terminal

        show_located(console or terminal(), self.located, self.opened.notes)

    def save(self, folder: str | Path) -> Path:
        """Write the model with the chosen heads edited, as an ordinary folder that transformers loads too."""
        if not self.located.ranked:
            raise InputError("no head was chosen, so there is no edit to save")
        self.opened.save(Path(folder), self.located.ranked, self.kind)
        return Path(folder)

    def write(self, out: Path, images: bool = True) -> None:
        """Write headmap.json, report.html with its JSON, and the records before and after."""
        from fairhead.report.page import write
        from fairhead.store import write_json

        write_json(out / "headmap.json", self.to_dict())
        write(self.page(images), out / "report.html")
        for name, records in self.opened.question.records(self.located.studies).items():
            records.save(out / f"{name}.csv")


def answer(
    source: Source,
    plan: LocatePlan,
    *,
    heads: Sequence[tuple[int, int]] | None = None,
    chosen_on: str | None = None,
    features: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> LocatedHeads:
    """Ask a question and answer it.

    Args:
        source: model, data and what is asked of them.
        plan: how heads are chosen and tested.
        heads: to be tested; None chooses them.
        chosen_on: a hash of the rows that these were chosen on, where it is known.
        features: folder that keeps the heads' terms.
        progress: called with (stage, done, all).
        provenance: anything else worth keeping, such as the command.

    Raises:
        InputError: the model has no such head, or model and data do not fit.
    """
    opened = open_question(source, plan, features, progress)
    check_heads(heads or (), opened.question.shape)
    found = find_heads(opened.question, plan, heads)
    if chosen_on not in (None, half_sha256(found.rows.ids, found.choosing)):
        found = replace(found, notes=(*found.notes, OTHER_HALF))
    kind = (plan.kinds or opened.question.kinds)[0]
    made = {"version": __version__, **(provenance or {}), **opened.provenance}
    return LocatedHeads(found, opened, kind, made)


def check_heads(heads: Sequence[tuple[int, int]], shape: tuple[int, int]) -> None:
    """Refuse heads that a model does not have.

    Example:
        >>> check_heads([(1, 2), (7, 0)], (2, 4))
        Traceback (most recent call last):
            ...
        fairhead.errors.InputError: there is no head L7H0: the model has 2 layers of 4 heads, counted from 0
    """
    for layer, head in heads:
        if layer >= shape[0] or head >= shape[1]:
            raise InputError(
                f"there is no head L{layer}H{head}: the model has {shape[0]} layers of {shape[1]} heads, counted from 0"
            )
