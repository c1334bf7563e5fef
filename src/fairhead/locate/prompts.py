"""Prompts: what a concept's poles and a data set's classes are called, and the text side that makes vectors of them.

A YAML file brings other prompts. Attributes are *perceived* ones: the words name what annotators saw, not who a person
is. A text side is anything that turns texts into vectors of the output representation's space.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairhead.errors import InputError, UnsupportedModel, did_you_mean
from fairhead.locate.head_features import Array
from fairhead.store import read_arrays, reading, yaml_value

# Texts -> [n, d'].
TextSide = Callable[[Sequence[str]], NDArray[np.floating]]
_BATCH = 64
TEMPLATES = ("a photo of a {}", "a portrait of a {}", "a close-up photo of a {}", "this is a {}")


@dataclass(frozen=True)
class Pole:
    """One end of a concept: its name in reports, synonyms for prompts, and values of the data's column that mean it."""

    name: str
    words: tuple[str, ...]
    levels: tuple[str, ...]


@dataclass(frozen=True)
class Prompts:
    """A concept in words."""

    name: str  # of the concept
    poles: tuple[Pole, Pole]  # both ends, with equally many words
    neutral: tuple[str, ...] = ()  # as many words of the same kind that say nothing about the attribute, as controls
    templates: tuple[str, ...] = TEMPLATES  # each with {} for the word

    def __post_init__(self) -> None:
        first, second = self.poles
        if not first.words or len(first.words) != len(second.words):
            raise InputError(
                f"the concept {self.name!r} has {len(first.words)} words for {first.name} and {len(second.words)} for "
                f"{second.name}; both poles need equally many, and at least one"
            )
        check_templates(self.templates)

    def texts(self, words: Sequence[str]) -> list[str]:
        """The prompts of some words."""
        return [template.format(word) for template in self.templates for word in words]


def check_templates(templates: Sequence[str]) -> None:
    """Refuse templates without a place for the word."""
    for template in templates:
        if "{}" not in template:
            raise InputError(f"the template {template!r} has no {{}} for the word")
    if not templates:
        raise InputError("there is no template; at least '{}' is needed")


@dataclass(frozen=True)
class PromptFile:
    """What a YAML file of prompts says; each part may be missing."""

    concept: Prompts | None = None
    classes: Mapping[str, tuple[str, ...]] | None = None
    templates: tuple[str, ...] | None = None


@dataclass(frozen=True)
class KnownPrompts:
    """The words that ship with fairhead (known_prompts.yaml)."""

    concepts: Mapping[str, Prompts]
    columns: Mapping[str, Mapping[str, str]]  # data set -> concept -> the column that holds it under another name
    classes: Mapping[str, Mapping[str, Mapping[str, tuple[str, ...]]]]  # data set -> column -> class -> words

    def column(self, data: str, concept: str) -> str:
        """The column of a data set that holds a concept."""
        return self.columns.get(data, {}).get(concept, concept)

    def concept(self, name: str) -> Prompts:
        """A concept, by its name."""
        if name not in self.concepts:
            raise InputError(
                f"there are no prompts for the concept {name!r}; there are some for {', '.join(self.concepts)}."
                f"{did_you_mean(name, list(self.concepts))} Others come from a YAML file (--prompts)"
            )
        return self.concepts[name]

    def words(self, data: str, target: str) -> Mapping[str, tuple[str, ...]]:
        """The classes of a data set's column, in words."""
        of_data = self.classes.get(data, {})
        if target not in of_data:
            raise InputError(
                f"there are no prompts for the classes of {target!r} of {data}; there are some for "
                f"{', '.join(of_data) or 'none of its columns'}. Others come from a YAML file (--prompts)"
            )
        return of_data[target]


@cache
def known_prompts() -> KnownPrompts:
    """What known_prompts.yaml says."""
    found = yaml_value(files("fairhead.locate").joinpath("known_prompts.yaml").read_text("utf-8"))
    concepts = {one["name"]: _concept(one, None, "known_prompts.yaml") for one in found["concepts"]}
    classes = {
        data: {column: {str(name): tuple(words) for name, words in of.items()} for column, of in columns.items()}
        for data, columns in found["classes"].items()
    }
    return KnownPrompts(concepts, found["columns"], classes)


def read_prompts(path: str | os.PathLike[str]) -> PromptFile:
    """Read prompts from YAML: `templates`, `classes`, and a `concept` as known_prompts.yaml has them."""
    with reading(path, "cannot be read as YAML"):
        content = yaml_value(Path(path).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise InputError(f"{path} should hold templates, concept and classes by name")
    for key in content:
        if key not in ("templates", "concept", "classes"):
            raise InputError(f"{path} has {key!r}; expected templates, concept and classes")
    templates = _words(content["templates"], f"{path}: templates") if "templates" in content else None
    if templates is not None:
        check_templates(templates)
    classes = content.get("classes")
    if classes is not None and not isinstance(classes, dict):
        raise InputError(f"{path}: classes should be a list of words by class")
    return PromptFile(
        _concept(content["concept"], templates, f"{path}: concept") if "concept" in content else None,
        None if classes is None else {str(name): _words(words, f"{path}: {name}") for name, words in classes.items()},
        templates,
    )


def _concept(content: Any, templates: tuple[str, ...] | None, where: str) -> Prompts:
    if not isinstance(content, dict) or not isinstance(content.get("poles"), dict) or len(content["poles"]) != 2:
        raise InputError(f"{where} should have a name and two poles, each with words and levels")
    poles = []
    for name, pole in content["poles"].items():
        if not isinstance(pole, dict):
            raise InputError(f"{where}: the pole {name!r} should have words and levels")
        words, levels = (_words(pole.get(key), f"{where}, {name}: {key}") for key in ("words", "levels"))
        poles.append(Pole(str(name), words, levels))
    neutral = _words(content["neutral"], f"{where}: neutral") if "neutral" in content else ()
    return Prompts(str(content.get("name", "concept")), (poles[0], poles[1]), neutral, templates or TEMPLATES)


def _words(content: Any, where: str) -> tuple[str, ...]:
    if not isinstance(content, list) or not content or not all(isinstance(w, str | int | bool) for w in content):
        raise InputError(f"{where} should be a list of words, at least one; found {content!r}")
    return tuple(str(word) for word in content)


def read_text_table(path: str | os.PathLike[str]) -> tuple[tuple[str, ...], Array]:
    """Texts and their vectors [n, d'], a pool for TextSpan, from an .npz file with `texts` [n] and `vectors`."""
    arrays = read_arrays(path, "texts", "vectors")
    texts, vectors = tuple(str(text) for text in arrays["texts"].tolist()), arrays["vectors"].astype(np.float64)
    if len(texts) != len(vectors) or not texts:
        raise InputError(f"a table of texts needs one vector a text; found {len(texts)} texts, {len(vectors)} vectors")
    return texts, vectors


class ClipText:
    """The text tower of a CLIP or SigLIP model with both towers, with its tokenizer."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        if not hasattr(model, "get_text_features"):
            raise UnsupportedModel(
                f"{type(model).__name__} has no text tower; give text vectors, or learn the concept from images"
            )
        self._model, self._tokenizer = model, tokenizer

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Unit vectors, [n, d']."""
        import torch

        device = next(self._model.parameters()).device
        # SigLIP was trained on texts padded to full length and reads its last position.
        padding = "max_length" if "siglip" in type(self._model).__name__.lower() else True
        found = []
        for batch in _tokens(texts, self._tokenizer, padding):
            with torch.no_grad():
                vectors = self._model.get_text_features(**batch.to(device))
            vectors = getattr(vectors, "pooler_output", vectors)
            found.append(torch.nn.functional.normalize(vectors.float(), dim=-1).double().cpu().numpy())
        return np.concatenate(found)


class AdaptedText:
    """A stand-in text side: a sentence encoder followed by a linear map that was fitted to known text vectors.

    x is the unit-length mean of the encoder's states over tokens; the vector is unit((x − mean) @ matrix). Results say
    something about the image tower's heads and nothing about the text tower that the map stands in for.
    """

    def __init__(self, encoder: Any, tokenizer: Any, matrix: NDArray[np.floating], mean: NDArray[np.floating]) -> None:
        width = encoder.config.hidden_size
        if matrix.ndim != 2 or matrix.shape[0] != width or mean.shape != (width,):
            raise InputError(
                f"the adapter maps {list(matrix.shape)} with a mean of {list(mean.shape)}; the encoder's states have "
                f"{width} dimensions: it belongs to another encoder"
            )
        self._encoder, self._tokenizer = encoder, tokenizer
        self._matrix, self._mean = np.asarray(matrix, dtype=np.float64), np.asarray(mean, dtype=np.float64)

    @property
    def width(self) -> int:
        """Dimensions of its vectors, d'."""
        return int(self._matrix.shape[1])

    @classmethod
    def load(cls, adapter: str | os.PathLike[str], encoder: str | os.PathLike[str]) -> "AdaptedText":
        """From an .npz file with `B` and `x_mean`, and the folder of the encoder."""
        from fairhead.models import open_model

        arrays = read_arrays(adapter, "B", "x_mean")
        loaded = open_model(encoder, "encoder")
        return cls(loaded.model, loaded.tokenizer, arrays["B"], arrays["x_mean"])

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Unit vectors, [n, d']."""
        import torch

        found = []
        for batch in _tokens(texts, self._tokenizer):
            with torch.no_grad():
                states = self._encoder(**batch).last_hidden_state.double()
            mask = batch["attention_mask"][..., None].double()
            found.append(((states * mask).sum(1) / mask.sum(1)).numpy())
        x = np.concatenate(found)
        vectors = (x / np.linalg.norm(x, axis=1, keepdims=True) - self._mean) @ self._matrix
        return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def text_side(adapter: str | None, encoder: str | None, loaded: Any) -> TextSide | None:
    """The stand-in that was given, or the text tower of a loaded model; None where there is neither."""
    if (adapter is None) != (encoder is None):
        raise InputError(
            "a text adapter and the encoder it belongs to are given together (--text-adapter, --text-encoder)"
        )
    if adapter is not None and encoder is not None:
        return AdaptedText.load(adapter, encoder)
    if not hasattr(loaded.model, "get_text_features"):
        return None
    try:
        return ClipText(loaded.model, loaded.tokenizer)
    except InputError as error:
        raise UnsupportedModel(f"the text tower has no tokenizer beside it: {error}") from None


def _tokens(texts: Sequence[str], tokenizer: Any, padding: str | bool = True) -> Iterator[Any]:
    """Batches of texts as tokens; no texts at all are refused, and texts in which the tokenizer finds nothing."""
    if not len(texts):
        raise InputError("there are no prompts to turn into vectors")
    for text in texts:
        if not text.strip() or not tokenizer(text, add_special_tokens=False)["input_ids"]:
            raise InputError(f"the prompt {text!r} has no token in it; every prompt needs a word that the model knows")
    for start in range(0, len(texts), _BATCH):
        yield tokenizer(list(texts[start : start + _BATCH]), padding=padding, truncation=True, return_tensors="pt")
