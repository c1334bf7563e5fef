"""`datasets` in and out: tables to audit, texts and pictures to train on, evaluations of a Trainer, and results."""

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import fairhead

hub = pytest.importorskip("datasets")

N = 120


def columns(n=N):
    rng = np.random.default_rng(0)
    sex, label = rng.choice(["f", "m"], n).tolist(), rng.integers(0, 2, n).tolist()
    said = [int(y if rng.random() < (0.9 if s == "f" else 0.6) else 1 - y) for y, s in zip(label, sex, strict=True)]
    return {"label": label, "said": said, "sex": sex}


def named(table):
    """With the classes' names beside their numbers."""
    return table.cast_column("label", hub.ClassLabel(names=["no", "yes"]))


def test_a_table_is_audited_and_its_results_become_tables():
    made = columns()
    options = {"label": "label", "prediction": "said", "groups": "sex", "n_boot": 200}
    found = fairhead.audit(hub.Dataset.from_dict(made), **options)
    assert found.to_dict()["estimates"] == fairhead.audit(pd.DataFrame(made), **options).to_dict()["estimates"]
    names = hub.Features(
        {
            "label": hub.ClassLabel(names=["no", "yes"]),
            "said": hub.ClassLabel(names=["no", "yes"]),
            "sex": hub.Value("string"),
        }
    )
    table = hub.Dataset.from_dict(made, features=names)
    records = fairhead.Records.from_frame(table, label="label", prediction="said", groups="sex")
    assert records.classes == ("no", "yes")
    rows = hub.Dataset.from_pandas(records.to_frame(), preserve_index=False)
    assert rows["label"][:] == [["no", "yes"][code] for code in made["label"]]
    assert rows["sex"][:] == made["sex"]
    figures = hub.Dataset.from_pandas(found.to_frame(), preserve_index=False).filter(lambda row: row["metric"] == "EOd")
    assert figures["value"][0] == found["EOd", "sex"].value


def test_parts_of_texts_and_of_pictures_are_read():
    texts = hub.DatasetDict(
        {
            "train": named(hub.Dataset.from_dict({"text": list("abcd"), "label": [0, 1, 0, 1]})),
            "validation": named(hub.Dataset.from_dict({"text": list("ef"), "label": [0, -1]})),
            "test": named(hub.Dataset.from_dict({"text": ["g"], "label": [1]})),
        }
    )
    data = fairhead.dataset(texts, on_error="skip")
    assert data.classes == ("no", "yes")
    assert data.sizes == {"train": 4, "val": 1, "test": 1}
    assert data.skipped == {"no value in label": ("row 6",)}
    pictures = {"image": [Image.new("RGB", (4, 4), (k, 0, 0)) for k in range(N)], **columns()}
    table = hub.Dataset.from_dict(pictures).cast_column("image", hub.Image())
    data = fairhead.dataset(table, label="label", groups=["sex"])
    assert data.all.inputs.as_array(2)[:, 0, 0, 0].tolist() == list(range(N))
    assert data.groups()["sex"].levels == ("f", "m")
