"""Any model folder at all: damaged headers, notes and configurations are loaded or refused in one line."""

import json
import random
import shutil
import warnings

import pytest
import torch
from classifiers import batch, build
from mutations import CORPUS, SECONDS, fuzz, mutated, reads_or_refuses
from safetensors.torch import load_file, save_file

from fairhead.mitigate import DAM, attach, load, save

NOTE = "fairhead._extra_state"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model that carries DAM."""
    found = tmp_path_factory.mktemp("model") / "whole"
    save(attach(build("BERT"), DAM()), found)
    return found


@pytest.fixture
def readers(folder, tmp_path):
    """By the part that is damaged: a reader of files that hold this part alone."""
    whole = (folder / "model.safetensors").read_bytes()
    data = whole[8 + int.from_bytes(whole[:8], "little") :]

    def model(**files):
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        shutil.copytree(folder, tmp_path / "model")
        for name, content in files.items():
            (tmp_path / "model" / name.replace("_", ".")).write_bytes(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whatever transformers thinks of it
            return load(tmp_path / "model")

    def note(path):
        weights = load_file(folder / "model.safetensors")
        weights[NOTE] = torch.frombuffer(bytearray(path.read_bytes() or b" "), dtype=torch.uint8)
        save_file(weights, tmp_path / "noted.safetensors", metadata={"format": "pt"})
        return model(model_safetensors=(tmp_path / "noted.safetensors").read_bytes())

    return {
        "header": lambda path: model(model_safetensors=path.read_bytes() + data),
        "config": lambda path: model(config_json=path.read_bytes()),
        "note": note,
    }


def seeds(part, folder):
    """The part as it is, and what of it once broke a reader."""
    whole = (folder / "model.safetensors").read_bytes()
    sound = {
        "header": whole[: 8 + int.from_bytes(whole[:8], "little")],
        "config": (folder / "config.json").read_bytes(),
        "note": bytes(load_file(folder / "model.safetensors")[NOTE].tolist()),
    }[part]
    (folder.parent / part).mkdir(exist_ok=True)
    (folder.parent / part / "whole").write_bytes(sound)
    return [folder.parent / part / "whole", *sorted((CORPUS / part).glob("broke-*"))]


@pytest.mark.parametrize("part", ["header", "config", "note"])
def test_damaged_models_are_loaded_or_refused(part, folder, readers, tmp_path):
    chance, files = random.Random(part), seeds(part, folder)
    outcomes = [reads_or_refuses(readers[part], file) for file in files]
    assert outcomes[0]
    for _ in range(25):
        (tmp_path / "damaged").write_bytes(mutated(chance.choice(files).read_bytes(), chance))
        outcomes.append(reads_or_refuses(readers[part], tmp_path / "damaged"))
    assert not all(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["header", "config", "note"])
def test_damaged_models_for_minutes(part, folder, readers, tmp_path):
    read, refused = fuzz(readers[part], seeds(part, folder), tmp_path / "damaged", SECONDS / 11, part, CORPUS / part)
    print(f"{part}: {read} read, {refused} refused")
    assert refused


@pytest.mark.parametrize("method", ["dam", "encoder_layer"])
@pytest.mark.parametrize(
    "change", [{"layer": 10**9}, {"values": -1}, {"eps": float("nan")}, {"__class__": "x"}, {"norm": []}]
)
def test_settings_that_nobody_wrote_are_refused(method, change, readers, folder, tmp_path):
    saved = json.loads(seeds("note", folder)[0].read_bytes())
    saved = {"method": method, "settings": {**(saved["settings"] if method == "dam" else {}), **change}}
    (tmp_path / "note").write_text(json.dumps(saved))
    assert not reads_or_refuses(readers["note"], tmp_path / "note")


def test_a_model_is_what_it_was(folder):
    assert load(folder)(**batch("BERT")).logits.isfinite().all()
