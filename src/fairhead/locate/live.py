"""Heads tried out by hand: what an edit of them changes, at once from stored parts, or in a true forward pass."""

import re
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fairhead.errors import InputError
from fairhead.locate.ablation import layer_matched
from fairhead.locate.edits import parsed
from fairhead.locate.head_maps import Head
from fairhead.locate.locate_settings import LocatePlan
from fairhead.locate.session import Opened
from fairhead.locate.studies import Edited
from fairhead.report.wording import head_name, metric_name
from fairhead.stats import Difference

_DRAWS = 40  # control sets of an edit that is answered at once
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class Live:
    """A question that is held open: heads in, figures of the reporting half out.

    Args:
        opened: the question, with forward passes.
        plan: replicates and level of what is proved.
        folder: where edited models are saved.
        chosen: the heads that `locate` chose, marked on the map.
    """

    def __init__(self, opened: Opened, plan: LocatePlan, folder: Path, chosen: Sequence[tuple[int, int]] = ()) -> None:
        self.opened, self.plan, self.folder, self.chosen = opened, plan, folder, tuple(chosen)
        self.question = opened.question
        self.rows = self.question.rows.take(self.question.reported)
        self.kinds = tuple(kind for kind in self.question.kinds if kind != "resample")
        self._direct: dict[str, Edited] = {}
        self._one_at_a_time = threading.Lock()  # the model

    @cached_property
    def map(self) -> Mapping[str, Any]:
        """The direct part of each head in the gap of the reporting half, [L, H], and which heads were chosen."""
        question = self.question
        found = question.direct_map(~question.choosing & question.comparable, self.plan.level)
        return {
            "measure": found.to_dict()["measure"],
            "values": [[_number(x) for x in row] for row in found.gap],
            "share": [[_number(x) for x in row] for row in found.share],
            "significant": (found.p_adjusted <= 0.05).tolist(),
            "chosen": [list(head) for head in self.chosen],
            "rows": len(self.rows),
        }

    def edit(self, heads: Sequence[Sequence[int]], kind: str) -> dict[str, Any]:
        """Every figure before and after, by the direct effect alone, beside that of random heads of the same layers."""
        chosen = self._heads(heads, kind)
        sets: Sequence[tuple[Head, ...]] = ()
        note = None
        if chosen:
            try:
                sets = layer_matched(chosen, self.question.shape[1], draws=_DRAWS, seed=self.plan.seed).sets
            except InputError as error:
                note = str(error)
        found = self.rows.figures(self._effects(kind)([(), chosen, *sets]))
        figures = [
            {
                "metric": metric,
                "name": metric_name(metric),
                "before": _number(values[0]),
                "after": _number(values[1]),
                "controls": [_number(x) for x in np.nanquantile(values[2:], (0.05, 0.95))]
                if _any(values[2:])
                else None,
            }
            for metric, values in found.items()
            if metric in self.shown
        ]
        return {"heads": [head_name(*head) for head in chosen], "figures": figures, "controls": len(sets), "note": note}

    @cached_property
    def shown(self) -> tuple[str, ...]:
        """The figures that the report of such a question tells."""
        return self.question.words((), self.plan).in_table

    def prove(self, heads: Sequence[Sequence[int]], kind: str) -> dict[str, Any]:
        """The same in a true forward pass, paired, with intervals."""
        chosen = self._some(heads, kind)
        with self._one_at_a_time:
            before, after = self.question.forward(self.question.reported, kind)([(), chosen])
        changes = self.rows.compare(before, after, self.plan).differences
        return {
            "heads": [head_name(*head) for head in chosen],
            "figures": [_proved(change) for change in changes if change.metric in self.shown],
            "rows": len(self.rows),
        }

    def save(self, heads: Sequence[Sequence[int]], kind: str, name: str) -> dict[str, Any]:
        """Bake the edit into the weights, in a folder of that name beside the head map."""
        chosen = self._some(heads, kind)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InputError(f"{str(name)[:70]!r} is no name for a folder here: use letters, digits, - and _")
        place = self.folder / name
        with self._one_at_a_time:
            if place.exists():
                raise InputError(f"{place} is there already: choose another name")
            self.opened.save(place, chosen, kind)
        return {"folder": str(place)}

    def _effects(self, kind: str) -> Edited:
        if kind not in self._direct:
            found = self.question.direct(kind, self.plan.seed)
            if found is None:
                raise InputError(f"{kind} has no direct effect here: prove it in a forward pass")
            self._direct[kind] = found
        return self._direct[kind]

    def _some(self, heads: Sequence[Sequence[int]], kind: str) -> tuple[Head, ...]:
        if not heads:
            raise InputError("no head is chosen: choose some on the map")
        return self._heads(heads, kind)

    def _heads(self, heads: Sequence[Sequence[int]], kind: str) -> tuple[Head, ...]:
        """Heads that there are, each once; an edit that is known."""
        if not isinstance(kind, str) or parsed(kind)[0] not in self.kinds:
            raise InputError(f"the edit is {str(kind)[:40]!r}; here it is {', '.join(self.kinds)}")
        layers, width = self.question.shape
        found = []
        for head in heads:
            if len(head) != 2 or not all(type(x) is int for x in head):
                raise InputError(f"{str(head)[:40]} is no head; expected [layer, head]")
            if not (0 <= head[0] < layers and 0 <= head[1] < width):
                raise InputError(f"there is no head {head_name(*head)}: the model has {layers} layers of {width} heads")
            found.append(Head(*head))
        return tuple(dict.fromkeys(found))


def _proved(change: Difference) -> dict[str, Any]:
    numbers = {"before": change.a, "after": change.b, "value": change.value, "low": change.low, "high": change.high}
    return {
        "metric": change.metric,
        "name": metric_name(change.metric),
        **{key: _number(value) for key, value in numbers.items()},
        "significant": change.p_adjusted is not None and change.p_adjusted <= 0.05,
    }


def _any(values: Any) -> bool:
    return len(values) > 0 and not bool(np.isnan(values).all())


def _number(value: Any) -> float | None:
    """As JSON has it: NaN is null there."""
    return None if value is None or not np.isfinite(value) else float(value)
