"""The text side: anything that turns texts into vectors of the output representation's space."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fairhead.errors import InputError, UnsupportedModel, did_you_mean

# Texts -> [n, d'].
TextSide = Callable[[Sequence[str]], NDArray[np.floating]]
_BATCH = 64


class TextTable:
    """Texts whose vectors are known: a text side for those alone, and a pool for TextSpan.

    Example:
        >>> table = TextTable(["a dog", "a cat"], np.eye(2))
        >>> table(["a cat"]).tolist()
        [[0.0, 1.0]]
    """

    def __init__(self, texts: Sequence[str], vectors: NDArray[np.floating]) -> None:
        if len(texts) != len(vectors) or not len(texts):
            raise InputError(
                f"a table of texts needs one vector a text; found {len(texts)} texts, {len(vectors)} vectors"
            )
        self.texts = tuple(str(text) for text in texts)
        self.vectors = np.asarray(vectors, dtype=np.float64)
        self._row = {text: i for i, text in enumerate(self.texts)}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "TextTable":
        """From an .npz file with `texts` [n] and `vectors` [n, d']."""
        arrays = _arrays(path, ("texts", "vectors"))
        return cls(arrays["texts"].tolist(), arrays["vectors"])

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Vectors of texts that are in the table."""
        check_texts(texts)
        missing = [text for text in texts if text not in self._row]
        if missing:
            raise InputError(
                f"{len(missing)} of {len(texts)} prompts are not in the table of text vectors, such as {missing[0]!r}."
                f"{did_you_mean(missing[0], self.texts)} It holds fixed texts only: use those, or another text side"
            )
        return self.vectors[[self._row[text] for text in texts]]


class ClipText:
    """The text tower of a CLIP or SigLIP model.

    Args:
        model: a model with both towers.
        tokenizer: its own.

    Example:
        >>> from transformers import AutoModel, AutoTokenizer
        >>> text = ClipText(AutoModel.from_pretrained("clip"), AutoTokenizer.from_pretrained("clip"))  # doctest: +SKIP
        >>> text(["a photo of a doctor"]).shape  # doctest: +SKIP
        (1, 512)
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        if not hasattr(model, "get_text_features"):
            raise UnsupportedModel(
                f"{type(model).__name__} has no text tower; give text vectors, or learn the concept from images"
            )
        self._model, self._tokenizer = model, tokenizer

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Unit vectors, [n, d']."""
        import torch

        check_texts(texts, self._tokenizer)
        device = next(self._model.parameters()).device
        found = []
        for start in range(0, len(texts), _BATCH):
            batch = self._tokenizer(list(texts[start : start + _BATCH]), padding="max_length" if self._fixed else True,
                                    truncation=True, return_tensors="pt").to(device)  # fmt: skip
            with torch.no_grad():
                vectors = self._model.get_text_features(**batch)
            vectors = getattr(vectors, "pooler_output", vectors)
            found.append(torch.nn.functional.normalize(vectors.float(), dim=-1).double().cpu().numpy())
        return np.concatenate(found)

    @property
    def _fixed(self) -> bool:
        # SigLIP was trained on texts padded to full length and reads its last position.
        return "siglip" in type(self._model).__name__.lower()


class AdaptedText:
    """A stand-in text side: a sentence encoder followed by a linear map that was fitted to known text vectors.

    x is the unit-length mean of the encoder's states over tokens; the vector is unit((x − x_mean) @ B). Results say
    something about the image tower's heads and nothing about the text tower that the map stands in for.

    Args:
        encoder: any encoder with `last_hidden_state`.
        tokenizer: its own.
        matrix: B, [width, d'].
        mean: x_mean, [width].

    Example:
        >>> text = AdaptedText.load("adapter.npz", "gte-small")  # doctest: +SKIP
        >>> text(["doctor", "nurse"]).shape  # doctest: +SKIP
        (2, 512)
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

        arrays = _arrays(adapter, ("B", "x_mean"))
        loaded = open_model(encoder, "encoder")
        return cls(loaded.model, loaded.tokenizer, arrays["B"], arrays["x_mean"])

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Unit vectors, [n, d']."""
        import torch

        check_texts(texts, self._tokenizer)
        found = []
        for start in range(0, len(texts), _BATCH):
            batch = self._tokenizer(list(texts[start : start + _BATCH]), padding=True, truncation=True,
                                    return_tensors="pt")  # fmt: skip
            with torch.no_grad():
                states = self._encoder(**batch).last_hidden_state.double()
            mask = batch["attention_mask"][..., None].double()
            found.append(((states * mask).sum(1) / mask.sum(1)).numpy())
        x = np.concatenate(found)
        vectors = (x / np.linalg.norm(x, axis=1, keepdims=True) - self._mean) @ self._matrix
        return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def check_texts(texts: Sequence[str], tokenizer: Any = None) -> None:
    """Refuse no texts at all, and texts in which the tokenizer finds nothing."""
    if not len(texts):
        raise InputError("there are no prompts to turn into vectors")
    for text in texts:
        if not text.strip() or (tokenizer is not None and not tokenizer(text, add_special_tokens=False)["input_ids"]):
            raise InputError(f"the prompt {text!r} has no token in it; every prompt needs a word that the model knows")


def _arrays(path: str | os.PathLike[str], names: tuple[str, ...]) -> Mapping[str, NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            lacking = [name for name in names if name not in file]
            if lacking:
                raise InputError(f"{path} has no array {lacking[0]!r}; it has {', '.join(file)}")
            return {name: file[name] for name in names}
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        # What numpy says of any other file is advice to unpickle it.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is no archive of arrays"
        raise InputError(f"{path} cannot be read as an .npz file: {reason}") from None
