"""The files of a model: where they are, and what those beside the weights say.

A model is a folder, a name of the Hugging Face hub in the local cache, or a LoRA adapter of either. Beside the weights
are a configuration, a tokenizer or an image processor, and digests of the rows that the model was trained on.
"""

import inspect
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers.utils import logging as transformers_logging

from fairhead.data import Examples
from fairhead.data.datasets import row_digests
from fairhead.errors import FairheadError, InputError, UnsupportedModel
from fairhead.store import reading as reading_file
from fairhead.store import write_json

ADAPTER = "adapter_config.json"
PROCESSOR = "preprocessor_config.json"
TRAINING_ROWS = "training_rows.json"
MOST_LAYERS = 10_000  # building them takes a minute, before the weights show that there are fewer
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
# Families that take pictures of one size; others fit their positions to any.
_ONE_SIZE = ("vit", "deit", "clip", "clip_vision_model", "siglip", "siglip_vision_model")
_PARTS = ("train", "validation")


class Place(NamedTuple):
    """Where the files of a model are."""

    name: str  # as it was given
    folder: Path  # has config.json and the weights
    adapter: Path | None = None  # has LoRA matrices to be merged into them

    def holding(self, *files: str) -> Path:
        """The folder that has one of these files: the adapter's where it does, else the model's."""
        both = [folder for folder in (self.adapter, self.folder) if folder is not None]
        return next((folder for folder in both if any((folder / file).is_file() for file in files)), self.folder)


def find(model: str | os.PathLike[str], download: bool = False) -> Place:
    """The files of a model, by the folder or the name on the hub."""
    if not isinstance(model, str | os.PathLike):
        expected = "a folder, hub:OWNER/NAME of the Hugging Face hub, or a model object"
        raise InputError(f"the model is {model!r}; expected {expected}")
    name = os.fspath(model).removeprefix("path:")
    folder = Path(name)
    if not folder.is_dir():
        folder = _cached(name, download)
    if (folder / "config.json").is_file():
        return Place(name, folder)
    if not (folder / ADAPTER).is_file():
        hint = f": did you mean {folder / 'model'}?" if (folder / "model" / "config.json").is_file() else ""
        raise InputError(f"{name}: expected a folder with a model (config.json); it has no config.json{hint}")
    base = str(read_json(folder / ADAPTER).get("base_model_name_or_path"))
    try:
        under = find(folder / base if (folder / base).is_dir() else base, download)
    except InputError:
        raise InputError(f"{name} is a LoRA adapter of {base}, which is neither a folder here nor cached") from None
    if under.adapter is not None:
        raise InputError(f"{name} is a LoRA adapter of {base}, which is one as well: merge that first")
    return Place(name, under.folder, folder)


def _cached(name: str, download: bool) -> Path:
    """The folder of a model of the hub in the local cache."""
    from huggingface_hub import snapshot_download

    wanted = name.removeprefix("hub:")
    download = download or wanted != name
    if not _HUB_NAME.fullmatch(wanted) or wanted.startswith("."):
        raise InputError(f"{name}: expected a folder with a model (config.json); it is not there")
    try:
        return Path(snapshot_download(wanted, local_files_only=not download, allow_patterns=list(_HUB_FILES)))
    except (OSError, ValueError) as error:
        if download:
            raise InputError(f"{name} cannot be fetched from the hub: {_one_line(error)}") from None
    raise InputError(
        f"{name}: expected a folder with a model (config.json); it is not there, nor is a model of that name in the "
        f"local cache of the hub (hub:{name} fetches it)"
    )


def origin(model: Any) -> Place | None:
    """The files of a model, or of what a live one says that it came from; None where there are none."""
    name = model if isinstance(model, str | Path) else getattr(getattr(model, "config", None), "_name_or_path", None)
    try:
        return find(name) if name else None
    except InputError:  # fresh weights, features, or a folder that is gone
        return None


def config_of(place: Place) -> Any:
    """The configuration of a model."""
    from transformers import AutoConfig

    # First: some configurations list their layers when they are read.
    for layers in _layers(read_json(place.folder / "config.json")):
        if not isinstance(layers, int) or not 0 <= layers <= MOST_LAYERS:
            raise InputError(f"{place.folder / 'config.json'} asks for {layers!r} layers, which no model has")
    return read_beside(place, "config.json", AutoConfig, place.folder)


def _layers(config: dict[str, Any]) -> Iterator[Any]:
    """The numbers of layers that a configuration names, those of its towers too."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _layers(value)
        elif name in ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "encoder_layers", "decoder_layers"):
            yield value or 0


def tokenizer_of(place: Place) -> Any:
    """The tokenizer beside a model; transformers has one for BERT and DistilBERT, which takes no token types."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    files = "tokenizer.json", "tokenizer_config.json"
    folder, config = place.holding(*files), read_json(place.folder / "config.json")
    if "image_size" in config and not any((folder / file).exists() for file in files):
        raise UnsupportedModel(
            f"{place.name} is a {config.get('model_type')} model, which reads pictures; texts need an encoder such as "
            "BERT or RoBERTa"
        )
    found = read_beside(place, "the tokenizer", transformers.AutoTokenizer, folder)
    # Without files, transformers makes a tokenizer of special tokens alone, or with SentencePiece's space: no word.
    if {*found.get_vocab()} <= {*found.all_special_tokens, "▁"}:
        raise InputError(
            f"{place.name} has no tokenizer: expected tokenizer.json beside {place.folder / 'config.json'}. Copy the "
            "tokenizer's files from the model that this one was trained from (tokenizer.save_pretrained)"
        )
    model = getattr(transformers, str(MODEL_MAPPING_NAMES.get(str(config.get("model_type")))), None)
    if model is not None and "token_type_ids" not in inspect.signature(model.forward).parameters:
        found.model_input_names = [name for name in found.model_input_names if name != "token_type_ids"]
    return found


def processor_of(place: Place) -> Any:
    """The image processor beside a model, on Pillow; tried on a picture, as its settings may be anything."""
    from PIL import Image
    from transformers import AutoImageProcessor

    what = "the image processor"
    found = read_beside(place, what, AutoImageProcessor, place.holding(PROCESSOR), backend="pil")
    with reading(place, what), np.errstate(all="raise"):
        made = found([Image.new("RGB", (32, 32), "white")], return_tensors="pt")
    config = read_json(place.folder / "config.json")
    tower = config.get("vision_config") or config
    own, given = tower.get("image_size"), list(made["pixel_values"].shape[-2:])
    if tower.get("model_type", config.get("model_type")) in _ONE_SIZE and isinstance(own, int) and given != [own, own]:
        raise InputError(
            f"{place.name}: {PROCESSOR} makes pictures of {given[1]} × {given[0]} pixels, and the model takes "
            f"{own} × {own} only: set its size (and crop_size) to {own}"
        )
    return found


def read_beside(place: Place, what: str, auto: Any, folder: Path, **options: Any) -> Any:
    """Anything but weights: a configuration, a tokenizer, an image processor."""
    with reading(place, what), quietly():
        return auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)


@contextmanager
def reading(place: Place, what: str) -> Iterator[None]:
    """Say in one line what cannot be loaded."""
    try:
        yield
    except FairheadError:
        raise
    except Exception as error:  # whatever a file that anybody may have written makes transformers raise
        if "Unrecognized configuration class" in str(error):
            family = read_json(place.folder / "config.json").get("model_type")
            raise UnsupportedModel(
                f"{place.name} is a {family} model, which transformers has no class for that does what is asked; give "
                "an encoder such as ViT or DINOv2 for pictures, BERT or RoBERTa for texts"
            ) from None
        if "trust_remote_code" in str(error):
            raise InputError(f"{place.name}: {what} asks for code of its own (auto_map), which is not run") from None
        raise InputError(f"{place.name}: {what} cannot be loaded: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def read_json(path: Path) -> dict[str, Any]:
    """What a JSON file says; nothing where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from None
    return found if isinstance(found, dict) else {}


@contextmanager
def quietly() -> Iterator[None]:
    """Without transformers' bars, and without its list of weights that are meant to be new, or to be left over."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def training_rows(model: Any) -> dict[str, frozenset[str]]:
    """Digests of the training rows and the validation rows of a folder, a name or a live model; empty where unknown.

    Figures on them say nothing about other rows. A digest is of the input (see `fairhead.data.datasets`), so that rows
    are known again whatever file, order, ids or seed of a split they come with.
    """
    place = origin(model)
    file = None if place is None else place.holding(TRAINING_ROWS) / TRAINING_ROWS
    if file is None or not file.is_file():
        return {}
    with reading_file(file, "is not a list of training rows: remove it, and the model's rows are not known"):
        found = json.loads(file.read_text(encoding="utf-8"))
        return {part: frozenset(found[part]) for part in _PARTS}


def with_training_rows(model: Any, rows: Mapping[str, Examples] | None = None) -> Callable[[Path], None]:
    """What writes into a folder the rows of `train` and `validation`, and those that the model knows from before."""
    before = training_rows(model)

    def write(folder: Path) -> None:
        own = {part: row_digests(rows[part]).tolist() if rows else () for part in _PARTS}
        both = {part: sorted({*before.get(part, ()), *own[part]}) for part in _PARTS}
        if any(both.values()):
            write_json(folder / TRAINING_ROWS, {"schema": "fairhead.training_rows/1", **both})

    return write


class SeenRows(NamedTuple):
    """Which rows a model was trained on, and which it was chosen by, [n] bool each."""

    train: NDArray[np.bool_]
    validation: NDArray[np.bool_]

    @property
    def any(self) -> NDArray[np.bool_]:
        """Rows of either kind."""
        return self.train | self.validation

    @property
    def words(self) -> str:
        """How many of each."""
        counts = {"trained on": int(self.train.sum()), "selected with": int((self.validation & ~self.train).sum())}
        return "the model was " + " and ".join(f"{how} {count:,} of them" for how, count in counts.items() if count)


def seen_rows(model: Any, examples: Examples) -> SeenRows | None:
    """Rows that a model has seen; None where it has seen none, or nothing is known."""
    known = training_rows(model)
    if not known:
        return None
    digests = row_digests(examples)
    found = SeenRows(*(np.isin(digests, sorted(known[part])) for part in _PARTS))
    return found if found.any.any() else None


def unseen(model: Any, examples: Examples, go_on: bool = False) -> Examples:
    """The rows that a model was neither trained on nor chosen by, and a warning of those left out.

    With `go_on` there is the warning only, and all are given back.
    """
    seen = seen_rows(model, examples)
    if seen is None:
        return examples
    count = f"{int(seen.any.sum()):,} of {len(examples):,} rows"
    if go_on:
        logging.getLogger("fairhead").warning("the model was trained on, or selected with, %s requested", count)
        return examples
    if seen.any.all():
        raise InputError(
            f"the model was trained on, or selected with, all {len(examples):,} requested rows: give others"
        )
    told = "%s are left out: %s (another seed draws another split)"
    logging.getLogger("fairhead").warning(told, count, seen.words)
    return examples.take(np.flatnonzero(~seen.any))
