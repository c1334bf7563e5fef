"""`fairhead push`: a saved model and its card, to the Hugging Face hub."""

import re
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from fairhead.cli.common import need
from fairhead.errors import FairheadError, InputError

EPILOG = """
The token is the one of `hf auth login`, or that of the environment variable `HF_TOKEN`.

**Example**

    fairhead push run/model my-name/fairer-faces --private
"""
# What a model is made of; records and reports, which may name persons, stay here.
_FILES = ("README.md", "*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
_NOT = ("fairhead-training.json", "training_rows.json")


def push_command(
    model: Annotated[Path, typer.Argument(metavar="FOLDER", help="A model that fairhead saved.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the model on the hub: you/model.")],
    private: Annotated[bool, typer.Option("--private", help="Only you, and whom you let, can see it.")] = False,
) -> None:
    """Upload a saved model with its card to the Hugging Face hub."""
    need()
    typer.echo(f"model: {push(model, name, private=private)}")


def push(folder: Path, name: str, *, private: bool = False) -> str:
    """Upload a model and return its address."""
    from huggingface_hub import CommitOperationAdd, HfApi

    from fairhead.report.model_card import CARD, renamed

    errors: Any = import_module("huggingface_hub.errors")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise InputError(f"{name!r} is no name on the hub; one such as you/model is expected")
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: a folder with a model (config.json) is expected; it is not there")
    if not (folder / CARD).is_file():
        raise InputError(f"{folder} has no {CARD}: a model without its card says nothing of its gaps. Write one first")
    files = sorted(file.name for pattern in _FILES for file in folder.glob(pattern) if file.name not in _NOT)
    api = HfApi()
    card = renamed(folder, name).encode()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        operations = [
            CommitOperationAdd(file, card if file == CARD else str(folder / file))  # of the folder nothing is changed
            for file in files
        ]
        api.create_commit(name, operations, commit_message="Upload a model and its card")
    except (errors.HTTPError, errors.LocalTokenNotFoundError, OSError) as error:
        code = getattr(getattr(error, "response", None), "status_code", None)
        if code in (401, 403) or isinstance(error, errors.LocalTokenNotFoundError):
            raise FairheadError(
                f"the hub does not let this token write {name}: log in with `hf auth login`, or set HF_TOKEN to a "
                "token that may write"
            ) from None
        if code is None:
            raise FairheadError(f"{api.endpoint} does not answer ({error}): nothing was uploaded") from None
        raise FairheadError(f"the hub refused {name}: {error}") from None
    return str(address)
