"""The methods for causal language models by name, and those of them that train nothing.

`klaad`, `cda` and `bias_unlearn` train on triplets (`language_trainer.train_folder`); `sentence_debias` folds a
projection into the output layer; `self_debias` changes what is read off the model, and no weight.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from fairhead.errors import InputError
from fairhead.language.swaps import read_swaps
from fairhead.language.training_record import FILE, TrainingRecord
from fairhead.mitigate.self_debias import SelfDebias
from fairhead.mitigate.sentence_debias import SentenceDebias, counterfactual_pairs, directions, project_out
from fairhead.mitigate.triplets import TripletData, targets
from fairhead.models import attach, open_model, save
from fairhead.models.attached import refuse_method
from fairhead.store import locked


def sentence_debias(
    model: str | os.PathLike[str],
    data: TripletData,
    out: str | os.PathLike[str],
    settings: SentenceDebias,
    *,
    device: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> TrainingRecord:
    """Read the training sentences, find the directions and write the model without them.

    Args:
        model: folder of a causal language model.
        data: triplets; the sentences of the training part are used.
        out: the new folder.
        settings: of the method.
        device: where to compute.
        progress: called with the pairs read and all of them.

    Raises:
        InputError: `out` holds a model; too few sentences have a word to swap.
    """
    with _fresh(out) as folder:
        split, swaps = data.read(), read_swaps(settings.swaps)
        pairs = counterfactual_pairs(split.train, swaps)
        loaded = open_model(model, "causal", device=device, dtype="float32")
        refuse_method(loaded.model, "the projection")
        axes = directions(loaded.model, loaded.tokenizer, pairs, settings.components, settings.batch_size, progress)
        project_out(loaded.model, axes)
        record = TrainingRecord(
            "sentence_debias",
            asdict(settings),
            data=data.described(),
            training_targets=targets(split.train),
            held_out_targets=targets(split.held_out),
            base=str(model),
            results={"pairs": len(pairs), "components": len(axes)},
        )
        save(loaded.model, folder, loaded.tokenizer.save_pretrained, record.write)
    return record


def self_debias(
    model: str | os.PathLike[str], out: str | os.PathLike[str], settings: SelfDebias, *, device: str = "auto"
) -> TrainingRecord:
    """Write the model with the settings beside it; what reads the folder through `fairhead lm` then applies them."""
    with _fresh(out) as folder:
        loaded = open_model(model, "causal", device=device, dtype="float32")
        carrier = attach(loaded.model, settings, loaded.tokenizer)
        record = TrainingRecord("self_debias", asdict(settings), base=str(model))
        save(carrier, folder, loaded.tokenizer.save_pretrained, record.write)
    return record


@contextmanager
def _fresh(out: str | os.PathLike[str]) -> Iterator[Path]:
    """The folder, for this run alone, without a model in it."""
    with locked(out) as folder:
        if (folder / FILE).is_file() or (folder / "config.json").is_file():
            raise InputError(f"{folder} holds a model already: choose another folder")
        yield folder
