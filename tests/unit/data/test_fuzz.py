"""Whatever a JSON file holds, a reader returns items or raises InputError."""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairhead.data import read
from fairhead.errors import InputError

STEREOSET = {
    "id": "1",
    "target": "t",
    "bias_type": "race",
    "context": "c",
    "sentences": [{"sentence": "s", "gold_label": g} for g in ("stereotype", "anti-stereotype", "unrelated")],
}
BBQ = {
    "example_id": 1,
    "question_index": "1",
    "question_polarity": "neg",
    "context_condition": "ambig",
    "category": "Age",
    "answer_info": {"ans0": ["a", "old"], "ans1": ["b", "nonOld"], "ans2": ["c", "unknown"]},
    "additional_metadata": {"subcategory": "None", "stereotyped_groups": ["old"]},
    **dict.fromkeys(("context", "question", "ans0", "ans1", "ans2"), "text"),
    "label": 2,
}
HATEXPLAIN = {
    post: {
        "annotators": [{"label": "normal", "target": ["Women"]}] * 3,
        "rationales": [[0, 1]],
        "post_tokens": ["a", "b"],
    }
    for post in ("1", "2")
}
FILES: dict[str, dict[str, Any]] = {
    "stereoset": {"dev.json": {"data": {"intrasentence": [STEREOSET], "intersentence": [STEREOSET]}}},
    "bbq": {"Age.jsonl": BBQ},
    "hatexplain": {"dataset.json": HATEXPLAIN, "post_id_divisions.json": {"train": ["1"], "test": ["2"]}},
    "bold": {"race_prompt.json": {"g": {"e": ["t", "u"]}}, "race_wiki.json": {"g": {"e": ["t", "u"]}}},
    "multinli": {
        "multinli_1.0_train.jsonl": {"gold_label": "neutral", "sentence1": "a", "sentence2": "b", "pairID": "1n"}
    },
}
STRANGE = [None, 3, -1.5, True, "x", "", [], {}, ["a"], {"a": 1}, [[]], [{}]]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from _paths(value[key], (*path, key))


def _mutated(value: Any, rng: random.Random) -> Any:
    value = copy.deepcopy(value)
    *way, last = rng.choice([p for p in _paths(value) if p])
    holder = value
    for key in way:
        holder = holder[key]
    if rng.random() < 0.3:
        del holder[last]
    else:
        holder[last] = rng.choice(STRANGE)
    return value


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_strange_json_gives_items_or_an_input_error(tmp_path: Path, name: str, on_error: str):
    rng = random.Random(name)
    outcomes = set()
    for _ in range(100):
        for file, content in FILES[name].items():
            (tmp_path / file).write_text(json.dumps(content))
        victim = rng.choice(list(FILES[name]))
        (tmp_path / victim).write_text(json.dumps(_mutated(FILES[name][victim], rng)))
        try:
            read(name, tmp_path, on_error=on_error)
            outcomes.add("read")
        except InputError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
