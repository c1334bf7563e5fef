"""Which rows are which: caches, splits, models and samples must know rows by what they are, not by their numbers."""

import io
import zipfile
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import fairhead
from fairhead.bench.cell import _built, contents_of, row_of
from fairhead.bench.engines import News
from fairhead.bench.grid import Backbone, Data, Grid, Method
from fairhead.bench.runner import run_grid
from fairhead.bench.tasks import read_task
from fairhead.data import dataset, hold, read_labelled
from fairhead.data.images import ReadyFeatures
from fairhead.errors import InputError
from fairhead.locate.locate_settings import Source
from fairhead.locate.rows import labelled_rows
from fairhead.models.fresh import Recipe
from fairhead.train.features import decoded_pictures

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


def noise(folder, n=1500, width=40, **columns):
    """Features of pure noise: whoever is right more often than not knows the rows."""
    rng = np.random.default_rng(0)
    names = np.array([str(i + 1) for i in range(n)])
    np.savez(folder / "f.npz", features=rng.normal(size=(n, width)).astype("f4"), names=names)
    frame = {"text": [f"post {i}" for i in range(n)], "y": rng.choice(["no", "yes"], n), "g": rng.choice(["a", "b"], n)}
    pd.DataFrame({**frame, **columns}).to_csv(folder / "n.csv", index=False)
    return f"features:{folder / 'f.npz'}", f"texts:{folder / 'n.csv'}"


HEAD = {"label": "y", "groups": ["g"], "train": "head"}


def test_rows_without_ids_are_not_joined_to_features_that_are_numbered_from_0(tmp_path):
    """They are numbered from 1: once each row got the features of the next, where the file had one to spare."""
    n = 40
    features, data = noise(tmp_path, n=n, width=4)
    vectors = np.arange(4.0 * (n + 1), dtype="f4").reshape(n + 1, 4)
    np.savez(tmp_path / "f.npz", features=vectors, names=np.arange(n + 1).astype(str))
    rows = read_labelled(data, label="y").all.take(range(5))
    with pytest.raises(fairhead.FairheadError, match="no ids and are numbered from 1"):
        ReadyFeatures.read(features).of(rows.inputs, rows.ids, rows.numbered)
    noise(tmp_path, n=n, width=4, id=np.arange(n))  # ids of their own are joined by name, whatever they look like
    np.savez(tmp_path / "f.npz", features=vectors, names=np.arange(n + 1).astype(str))
    rows = read_labelled(data, label="y").all
    assert np.array_equal(ReadyFeatures.read(features).of(rows.inputs, rows.ids, rows.numbered), vectors[:n])


def test_discover_leaves_out_the_rows_that_the_model_was_trained_on(tmp_path, caplog):
    features, data = noise(tmp_path)
    fairhead.mitigate(features, data, "erm", seed=1, out=tmp_path / "run", weight_decay=1e-4, **HEAD)
    how = {"label": "y", "model": tmp_path / "run" / "model", "clusters": 2}
    found = fairhead.discover(data, features, **how).audit["accuracy"]
    drawn = [{*read_labelled(data, label="y", seed=seed).examples("test").ids.tolist()} for seed in (0, 1)]
    assert found.n == len(drawn[0] & drawn[1]) < 150
    assert "are left out: the model was trained on " in caplog.text
    assert fairhead.discover(data, features, part="all", **how).audit["accuracy"].n == 1500
    assert "1,100 of 1,500 rows requested" in caplog.text


def test_rows_are_known_by_id_where_a_text_stands_in_for_features(tmp_path):
    features, data = noise(tmp_path, n=200, width=4, text="t")
    run = fairhead.mitigate(features, data, "erm", out=tmp_path / "run", **HEAD)
    found = fairhead.discover(data, features, label="y", model=tmp_path / "run" / "model", clusters=2)
    assert found.audit["accuracy"].n == run.audit["accuracy"].n  # the whole test part


def pictures(folder, seed, n=80, **columns):
    folder.mkdir()
    rng = np.random.default_rng(seed)
    for i in range(n):
        Image.fromarray(rng.integers(0, 255, (8, 8, 3)).astype("u1")).save(folder / f"{i}.png")
    chance = np.random.default_rng(5)
    columns |= {"y": chance.choice(["no", "yes"], n), "g": chance.choice(["a", "b"], n)}
    pd.DataFrame({"file": [f"{i}.png" for i in range(n)], **columns}).to_csv(folder / "l.csv", index=False)
    return f"images:{folder / 'l.csv'}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny classifier of pictures, trained with another seed than splits are drawn with by default."""
    folder = tmp_path_factory.mktemp("trained")
    data = pictures(folder / "a", 1)
    how = {"label": "y", "groups": ["g"], "epochs": 1, "batch_size": 16, "model_options": TINY, "cache": folder}
    fairhead.mitigate("vit-1x2", data, "erm", seed=3, out=folder / "run", **how)
    return data, folder / "run"


def test_predict_and_locate_leave_out_the_rows_of_the_training(trained, tmp_path, caplog, monkeypatch):
    data, run = trained
    monkeypatch.setattr("fairhead.locate.rows._ENOUGH", 5)
    tested = {*map(str, fairhead.Records.read(run / "records.csv").id.tolist())}
    own = read_labelled(data, label="y", seed=3)
    tests = read_labelled(data, label="y").examples("test").ids.tolist()
    assert {*fairhead.predict(run / "model", data, label="y").id.tolist()} == tested & {*tests}
    assert len(fairhead.predict(run / "model", data, label="y", part="all")) == 80
    assert "rows requested" in caplog.text
    # What is loaded from there and saved elsewhere knows them, too.
    fairhead.models.save(fairhead.load(run / "model"), tmp_path / "again")
    found = labelled_rows(Source(str(tmp_path / "again"), data, "g", "y"))
    assert {*found.evaluation.ids.tolist()} == tested
    train, validation = own.sizes["train"], own.sizes["val"]
    why = f"the model was trained on {train} of them and selected with {validation} of them."
    assert found.notes == (f"{train + validation} images were left out: {why}",)
    # Of few rows, those that the model was chosen by stay.
    monkeypatch.setattr("fairhead.locate.rows._ENOUGH", 400)
    found = labelled_rows(Source(str(tmp_path / "again"), data, "g", "y"))
    assert {*found.evaluation.ids.tolist()} == tested | {*own.examples("val").ids.tolist()}
    assert found.notes[0] == f"{train} images were left out: the model was trained on them."
    assert found.notes[1].startswith(f"{validation} images that it was chosen by are used: without them fewer than 400")


def test_a_model_that_is_trained_again_is_not_tested_on_rows_it_knows(trained, tmp_path):
    data, run = trained
    tested = {*map(str, fairhead.Records.read(run / "records.csv").id.tolist())}
    drawn = {seed: {*read_labelled(data, label="y", seed=seed).examples("test").ids.tolist()} for seed in range(20)}
    seed = next(seed for seed, ids in drawn.items() if 0 < len(ids & tested) < len(ids))
    again = Data("own", data, {"label": "y", "seed": seed})
    task = read_task(again, lambda classes: Recipe(f"path:{run / 'model'}", classes), 0, tmp_path)
    assert {*task.test_ids.tolist()} == tested & drawn[seed]


def test_features_of_heads_are_not_those_of_other_pictures_with_the_same_ids(trained, tmp_path):
    model, how = trained[1] / "model", {"by": "g", "label": "y", "rank": "gap", "draws": 20, "n_boot": 200}
    split = ["train"] * 4 + ["test"] * 196
    first, other = (pictures(tmp_path / name, seed, 200, split=split) for name, seed in (("b", 2), ("c", 3)))
    before = fairhead.locate(model, first, features=tmp_path / "features", **how).to_frame()
    found = fairhead.locate(model, other, features=tmp_path / "features", **how).to_frame()
    assert found.equals(fairhead.locate(model, other, features=tmp_path / "alone", **how).to_frame())
    assert not found.equals(before)


def test_one_group_among_the_test_rows_is_refused_before_features_are_made(tmp_path, monkeypatch):
    parts = ["train"] * 160 + ["val"] * 20 + ["test"] * 20
    features, data = noise(tmp_path, n=200, width=4, split=parts, g=["a", "b"] * 90 + ["a"] * 20)
    monkeypatch.setattr("fairhead.bench.cell._Ready._features", lambda *_, **__: pytest.fail("features were made"))
    with pytest.raises(InputError, match="the test rows have one group only in the column 'g', a"):
        fairhead.mitigate(features, data, "erm", out=tmp_path / "run", **HEAD)


def test_an_audit_that_fails_leaves_the_model(tmp_path, monkeypatch):
    features, data = noise(tmp_path, n=200, width=4)

    def broken(*_, **__):
        raise InputError("no audit")

    monkeypatch.setattr("fairhead.bench.cell.audit", broken)
    with pytest.raises(InputError, match="no audit"):
        fairhead.mitigate(features, data, "erm", out=tmp_path / "run", **HEAD)
    fairhead.load(tmp_path / "run" / "model")


def test_features_of_test_rows_that_are_no_numbers_are_refused_before_training(tmp_path, monkeypatch):
    features, data = noise(tmp_path, n=200, width=4)
    arrays = dict(np.load(tmp_path / "f.npz"))
    tests = read_labelled(data, label="y").examples("test").ids
    arrays["features"][int(tests[0]) - 1, 2] = np.nan
    np.savez(tmp_path / "f.npz", **arrays)
    monkeypatch.setattr("fairhead.bench.cell.run", lambda *_, **__: pytest.fail("was trained"))
    with pytest.raises(InputError, match=f"column 2 of the test features is not finite in 1 of {len(tests)} rows"):
        fairhead.mitigate(features, data, "erm", out=tmp_path / "run", **HEAD | {"seed": 0})


def test_a_table_that_changed_is_read_again(tmp_path):
    features, data = noise(tmp_path, n=40, width=4)
    one = Data("own", data, {"label": "y"})
    assert read_task(one, lambda classes: Recipe(features, classes), 0).classes == ("no", "yes")
    noise(tmp_path, n=40, width=4, y=["NO", "YES"] * 20)
    assert read_task(one, lambda classes: Recipe(features, classes), 0).classes == ("NO", "YES")
    noise(tmp_path, n=40, width=4, y=["no"] * 40)
    with pytest.raises(InputError, match="every row has the label 'no'; training needs at least two classes"):
        read_task(one, lambda classes: Recipe(features, classes), 0)


def test_a_model_that_changed_is_loaded_again(trained, tmp_path):
    folder, first = tmp_path / "model", []
    for value in (0.25, 0.5):
        model = fairhead.load(trained[1] / "model")
        torch.nn.init.constant_(next(model.parameters()), value)
        fairhead.models.save(model, folder)
        first.append(next(_built(Recipe(f"path:{folder}", ("no", "yes")), "image", 0).parameters()).flatten()[0].item())
    assert first == [0.25, 0.5]


def test_a_cell_is_run_again_when_its_data_or_features_have_changed(tmp_path, monkeypatch):
    features, data = noise(tmp_path, n=40, width=4)
    ran = []

    def faked(cells, workplace):
        for cell in cells:
            ran.append(cell.seed)
            row = {**row_of(cell, "done"), "contents": contents_of(cell), "figures": {}}
            yield News(cell, "done", 1, 1, "", row, fairhead.Records.from_arrays(["a", "b"], ["a", "b"], id=["1", "2"]))

    monkeypatch.setattr("fairhead.bench.runner.run_cells", faked)
    cells = (Data("own", data, {"label": "y"}),), (Backbone("f", features),), (Method("erm", "erm"),)
    grid = Grid("made", *cells, seeds=(0, 1))
    for _ in range(2):
        run_grid(grid, tmp_path / "out")
        assert ran == [0, 1]  # the second time nothing is left to do
    noise(tmp_path, n=40, width=4, y=["NO", "YES"] * 20)
    run_grid(grid, tmp_path / "out")
    assert ran == [0, 1, 0, 1]
    # Where the files lie does not matter, nor when they were written.
    (tmp_path / "moved").mkdir()
    moved = tmp_path / "moved" / "n.csv"
    moved.write_bytes((tmp_path / "n.csv").read_bytes())
    other = replace(grid.cells()[0], data=Data("own", f"texts:{moved}", {"label": "y"}))
    assert contents_of(grid.cells()[0]) == contents_of(other)


def test_rows_of_the_data_are_left_out_of_the_deployment_sample(tmp_path, caplog):
    def table(name, numbers):
        rows = [{"file": f"{i}.png", "y": "pq"[i % 2], "who": f"w{i // 2}"} for i in numbers]
        pd.DataFrame(rows).to_csv(tmp_path / name, index=False)
        return f"images:{tmp_path / name}"

    for i in range(60):
        noisy(np.random.default_rng(i), 0).save(tmp_path / f"{i}.png")
    how = {"label": "y", "person": "who"}
    one = Data("own", table("data.csv", range(40)), how, like=table("like.csv", range(30, 60)))
    task = read_task(one, lambda classes: Recipe("vit-1x2", classes, TINY), 0, tmp_path / "cache")
    assert len(task.like) == len(task.like_units) == 20
    assert "10 of 30 rows of the deployment sample are among the data, and are left out" in caplog.text
    expected = read_labelled(one.like, **how).all
    pixels = expected.inputs.as_array(8)[10:].transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(task.like.inputs["pixel_values"].numpy(), pixels)
    np.testing.assert_array_equal(task.like.labels.numpy(), expected.labels[10:])
    with pytest.raises(InputError, match="all 40 rows of the deployment sample are among the data"):
        read_task(replace(one, like=one.read), lambda classes: Recipe("vit-1x2", classes, TINY), 0, tmp_path / "cache")
