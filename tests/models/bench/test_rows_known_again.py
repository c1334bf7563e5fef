"""Which rows are which: caches, splits, models and samples must know rows by what they are, not by their numbers."""

import io
import zipfile

import numpy as np
from PIL import Image

from fairhead.bench.grid import Data
from fairhead.bench.tasks import read_task
from fairhead.data import dataset, hold, read_labelled
from fairhead.models.fresh import Recipe
from fairhead.train.cache import decoded_pictures

TINY = {"width": 16, "mlp": 32, "image_size": 8, "patch_size": 4}


def noisy(rng, shade):
    return Image.fromarray(np.clip(rng.normal(120 + shade, 10, (8, 8, 3)), 0, 255).astype("u1"))


def test_pictures_in_memory_are_not_taken_for_those_of_an_earlier_run(tmp_path):
    for shade in (0, 100):
        pictures = [noisy(np.random.default_rng(i), shade) for i in range(40)]
        data = dataset(pictures, label=["no", "yes"] * 20)
        task = read_task(Data("own", hold(data)), lambda classes: Recipe("vit-1x2", classes, TINY), 0, tmp_path)
        expected = data.examples("train").inputs.as_array(8).transpose(0, 3, 1, 2)
        np.testing.assert_array_equal(task.train.inputs["pixel_values"].numpy(), expected)


def test_two_columns_of_pictures_in_one_archive_are_decoded_apart(tmp_path):
    rng, n = np.random.default_rng(0), 20
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        for folder, shade in (("face", 100), ("body", 0)):
            for i in range(n):
                file = io.BytesIO()
                noisy(rng, shade).save(file, "PNG")
                archive.writestr(f"{folder}/{i}.png", file.getvalue())
        rows = [f"face/{i}.png,body/{i}.png,{'pq'[i % 2]}" for i in range(n)]
        archive.writestr("labels.csv", "\n".join(["face,body,y", *rows]))
    face, body = (read_labelled(f"images:{tmp_path / 'two.zip'}", input=name, label="y") for name in ("face", "body"))
    for data in (face, body, face):
        kept = decoded_pictures(data.all.inputs, 8, tmp_path)
        np.testing.assert_array_equal(kept, data.all.inputs.as_array(8).transpose(0, 3, 1, 2))


def test_a_picture_that_changed_is_decoded_again(tmp_path):
    for i in range(4):
        noisy(np.random.default_rng(i), 0).save(tmp_path / f"{i}.png")
    (tmp_path / "l.csv").write_text("file,y\n" + "".join(f"{i}.png,{'pq'[i % 2]}\n" for i in range(4)))
    pictures = read_labelled(f"images:{tmp_path / 'l.csv'}", label="y").all.inputs
    before = decoded_pictures(pictures, 8, tmp_path / "cache")
    noisy(np.random.default_rng(9), 100).save(tmp_path / "2.png")
    after = decoded_pictures(pictures, 8, tmp_path / "cache")
    assert [bool((a == b).all()) for a, b in zip(before, after, strict=True)] == [True, True, False, True]
