"""Where the files of a model are: a folder, a name of the Hugging Face hub in the local cache, a LoRA adapter."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils import logging

from fairhead.errors import FairheadError, InputError, UnsupportedModel

ADAPTER = "adapter_config.json"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
MOST_LAYERS = 10_000  # building them takes a minute, before the weights show that there are fewer


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
    name = os.fspath(model).removeprefix("path:")
    folder = Path(name)
    if not folder.is_dir():
        folder = _cached(name, download)
    if (folder / "config.json").is_file():
        return Place(name, folder)
    if not (folder / ADAPTER).is_file():
        raise InputError(f"{name}: a folder with a model (config.json) is expected; it has no config.json")
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
        raise InputError(f"{name}: a folder with a model (config.json) is expected; it is not there")
    try:
        return Path(snapshot_download(wanted, local_files_only=not download, allow_patterns=list(_HUB_FILES)))
    except (OSError, ValueError) as error:
        if download:
            raise InputError(f"{name} cannot be fetched from the hub: {_one_line(error)}") from None
    raise InputError(
        f"{name}: a folder with a model (config.json) is expected; it is not there, nor is a model of that name in the "
        f"local cache of the hub (hub:{name} fetches it)"
    )


def config_of(place: Place) -> Any:
    """Its configuration."""
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
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
