"""Heads as users name them: L11H1,L10H5, or those that a head map of `fairhead locate` has chosen."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairhead.errors import InputError
from fairhead.report.form import is_head

Heads = tuple[tuple[int, int], ...]  # (layer, head), from 0


def heads_named(text: str) -> Heads:
    """Heads from their names, each once.

    Example:
        >>> heads_named("L1H2, L0H3, L1H2")
        ((1, 2), (0, 3))
    """
    found = [re.fullmatch(r"\s*[Ll](\d+)[Hh](\d+)\s*", part) for part in text.split(",")]
    if not all(found):
        raise InputError(f"{text!r} does not name heads; write them as L11H4,L10H5 (layer and head from 0)")
    return tuple(dict.fromkeys((int(match[1]), int(match[2])) for match in found if match))


def read_head_map(path: str | Path) -> dict[str, Any]:
    """A headmap.json of `fairhead locate`; its "selected" heads are pairs."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} is not a head map of fairhead locate: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{path} is not a head map of fairhead locate, nor other JSON: {error}") from None
    selected = content.get("selected") if isinstance(content, dict) else None
    if not isinstance(selected, list) or not all(map(is_head, selected)):
        raise InputError(f"{path} is not a head map of fairhead locate: it has no list “selected” of [layer, head]")
    return {**content, "selected": tuple((layer, head) for layer, head in selected)}


def check_heads(heads: Sequence[tuple[int, int]], per_layer: Sequence[int]) -> None:
    """Refuse heads that a model does not have; `per_layer` says how many each of its layers has."""
    for layer, head in heads:
        if layer >= len(per_layer) or head >= per_layer[layer]:
            sizes = " or ".join(map(str, sorted(set(per_layer))))
            raise InputError(
                f"there is no head L{layer}H{head}: the model has {len(per_layer)} layers of {sizes} heads, counted "
                "from 0"
            )
