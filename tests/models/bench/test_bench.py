"""Grids from end to end on made pictures: results, resuming after a kill, failures, the table."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
import yaml
from made_faces import GRID, make_faces

from fairhead.audit import audit, compare
from fairhead.bench.cell import run_cell
from fairhead.bench.engines import Workplace
from fairhead.bench.grid_file import grid_path, read_grid
from fairhead.bench.results_folder import Store
from fairhead.bench.runner import run_grid
from fairhead.bench.table import markdown, report_of
from fairhead.bench.table_figures import table_of
from fairhead.bench.tasks import read_task
from fairhead.cli import main
from fairhead.errors import InputError, UnsupportedModel
from fairhead.models.fresh import Recipe
from fairhead.models.load import device_named
from fairhead.report import render


@pytest.fixture(scope="module")
def faces(tmp_path_factory):
    return make_faces(tmp_path_factory.mktemp("faces"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def grid_of(tmp_path, faces):
    def read(*changes, text=GRID):
        (tmp_path / "grid.yaml").write_text(text)
        return read_grid(tmp_path / "grid.yaml", changes, {"FACES": str(faces)})

    return read


@pytest.fixture(scope="module")
def finished(tmp_path_factory, faces, cache):
    """A grid that has been run: (grid, folder)."""
    out = tmp_path_factory.mktemp("out")
    (out / "grid.yaml").write_text(GRID)
    grid = read_grid(out / "grid.yaml", [], {"FACES": str(faces)})
    outcome = run_grid(grid, out, Workplace("cpu", 2, cache))
    assert outcome == (0, 4, 0)
    return grid, out


def test_training_is_given_inputs_and_labels_and_nothing_else(grid_of, cache):
    cell = grid_of().cells()[0]
    task = read_task(cell.data, lambda classes: Recipe(cell.backbone.model, classes, cell.backbone.settings), 0, cache)
    for part in (task.train, task.validation, task.test):
        assert set(part.inputs) == {"pixel_values"}
        assert part.inputs["pixel_values"].dtype == torch.uint8
    assert (len(task.train), len(task.validation), len(task.test)) == (128, 16, 16)


def test_pictures_are_normalised_by_the_model(grid_of, cache):
    cell = grid_of().cells()[0]
    recipe = Recipe(cell.backbone.model, ("a", "b"), cell.backbone.settings)
    task = read_task(cell.data, lambda classes: recipe, 0, cache)
    pixels = task.test.inputs["pixel_values"]
    model = recipe.build("image", seed=0).eval()
    by_hand = (pixels.float() / 255 - 0.5) / 0.5
    torch.testing.assert_close(model(pixel_values=pixels).logits, model(pixel_values=by_hand).logits)


def test_decoded_pictures_are_those_of_the_reader(grid_of, cache):
    cell = grid_of().cells()[0]
    recipe = Recipe(cell.backbone.model, ("a", "b"), cell.backbone.settings)
    whole = read_task(cell.data, lambda classes: recipe, 3, cache)
    limited = grid_of("limit=10").cells()[0].data
    some = read_task(limited, lambda classes: recipe, 3, cache)
    row_of = {name: row for row, name in enumerate(whole.test_ids)}
    rows = [row_of[name] for name in some.test_ids]
    assert len(rows) == 10
    assert torch.equal(whole.test.inputs["pixel_values"][rows], some.test.inputs["pixel_values"])


def test_a_result_whose_fields_are_of_another_kind_is_refused(finished, tmp_path):
    grid, out = finished
    shutil.copytree(out, tmp_path / "odd")
    first, *others = (out / "results.jsonl").read_text().splitlines()
    for name in ("effective", "stages", "rows", "cost", "made_with", "classes", "group"):
        for strange in (3, [[]], {"plan": 7, "test": "x"}, [["training", 1.0]]):
            changed = json.dumps({**json.loads(first), name: strange})
            (tmp_path / "odd" / "results.jsonl").write_text("\n".join([changed, *others, ""]))
            with pytest.raises(InputError, match=r"results\.jsonl has an odd result|not among the classes"):
                table_of(grid, Store(tmp_path / "odd"))


def test_each_cell_has_a_row_and_records(finished):
    grid, out = finished
    store = Store(out)
    rows = store.rows()
    assert {row["cell"] for row in rows} == {cell.name for cell in grid.cells()}
    for row in rows:
        records = store.records(row)
        assert len(records) == row["rows"]["test"] == 16
        assert set(records.groups) == {"white", "race"}
        again = audit(records, group_by="white", metrics=["accuracy"], n_boot=100)["accuracy"].value
        assert row["figures"]["accuracy"]["value"] == pytest.approx(again)
        assert row["cost"]["seconds"] > 0
        assert row["cost"]["energy_wh"] is None
        assert row["stages"][0][2] == 2 * (128 // 16)
    assert sorted(path.name for path in out.iterdir()) == [".lock", "grid.yaml", "records", "results.jsonl"]


def test_seeds_have_splits_of_their_own_and_methods_share_them(finished):
    _, out = finished
    store = Store(out)
    ids = {row["cell"]: frozenset(store.records(row).id.tolist()) for row in store.rows()}
    assert ids["faces/tiny/erm/0"] == ids["faces/tiny/dam/0"]
    assert ids["faces/tiny/erm/0"] != ids["faces/tiny/erm/1"]


def test_the_same_cell_gives_the_same_answers(finished, cache):
    grid, out = finished
    store = Store(out)
    row = next(row for row in store.rows() if row["cell"] == "faces/tiny/dam/1")
    cell = next(cell for cell in grid.cells() if cell.name == row["cell"])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        again = run_cell(cell, "cpu", cache).records
    finally:
        torch.set_num_threads(threads)
    np.testing.assert_allclose(store.records(row).scores, again.scores, atol=1e-5)


def test_a_finished_grid_is_not_run_again_but_a_changed_one_is(finished, faces, tmp_path):
    grid, out = finished
    assert run_grid(grid, out, Workplace()) == (4, 0, 0)
    (tmp_path / "grid.yaml").write_text(GRID)
    changed = read_grid(tmp_path / "grid.yaml", ["epochs=1"], {"FACES": str(faces)})
    with pytest.raises(InputError, match=r"no cell of 'Made faces' is done; .* has 4 results .* with other settings"):
        table_of(changed, Store(out))


def test_the_table_agrees_with_the_audit_and_the_paired_comparison(finished):
    grid, out = finished
    store = Store(out)
    (block,) = table_of(grid, store).blocks
    erm, dam = block.methods
    records = {row["cell"]: store.records(row) for row in store.rows()}
    for metric in ("DP", "accuracy"):
        by_seed = [
            compare(
                records[f"faces/tiny/erm/{seed}"],
                records[f"faces/tiny/dam/{seed}"],
                group_by="white",
                metrics=[metric],
                n_boot=100,
                n_perm=500,
                min_cell=1,
            ).differences[0]
            for seed in (0, 1)
        ]
        if erm.figures[metric].mean is None:
            assert "at least 10" in erm.figures[metric].undefined
            continue
        assert erm.figures[metric].mean == pytest.approx(np.mean([d.a for d in by_seed]))
        assert dam.differences[metric].value == pytest.approx(np.mean([d.value for d in by_seed]))
    assert not erm.differences


class _Balanced(HTMLParser):
    void = frozenset({"meta", "br", "line", "circle", "link"})

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.void:
            assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else(finished):
    grid, out = finished
    table = table_of(grid, Store(out), "fairhead bench <b>grid</b>")
    page = render(report_of(table))
    parser = _Balanced()
    parser.feed(page)
    assert parser.open == []
    assert "http" not in page.replace("http-equiv", "")
    assert "<b>grid" not in page
    for text in (page, markdown(table)):
        assert "erm" in text
        assert "dam" in text
    json.loads(json.dumps(table.to_dict(), allow_nan=False))


def test_dam_s_verdict_in_miniature(tmp_path, cache):
    """The grid that ships, on made faces: epochs that test rows choose are fenced off and held against their like."""
    content = yaml.safe_load(grid_path("dam-verdict").read_text(encoding="utf-8"))
    made = yaml.safe_load(GRID)
    content |= {"data": made["data"], "backbones": made["backbones"], "seeds": [0, 1], "n_boot": 200}
    content["plan"] |= {"epochs": 3, "batch_size": 64, "learning_rate": 0.01, "precision": "no", "compile": False}
    for entry in [*content["methods"], *content["references"]]:
        if "model" in entry:
            entry |= {"model": "vit-1x2", "plan": {"epochs": 2, "learning_rate": 0.01}}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(content))
    faces = make_faces(tmp_path / "faces", n=1600, hard=True)
    grid = read_grid(tmp_path / "grid.yaml", [], {"FACES": str(faces)})
    assert run_grid(grid, tmp_path / "out", Workplace("cpu", 2, cache)) == (0, 16, 0)
    store = Store(tmp_path / "out")
    rows = {row["cell"]: row for row in store.rows()}
    for seed in (0, 1):
        plain, chosen = (rows[f"faces/tiny/{name}/{seed}"] for name in ("dam", "dam epoch chosen on test rows"))
        # The same training; the epoch is the first with the smallest EOd of the very records that are kept.
        assert [loss for _, loss, _ in plain["history"]] == [loss for _, loss, _ in chosen["history"]]
        scores = [score for _, _, score in chosen["history"]]
        assert chosen["best_epoch"] == 1 + scores.index(max(scores))
        assert chosen["figures"]["EOd"]["value"] == pytest.approx(-max(scores), abs=1e-5)
        assert chosen["figures"]["EOd"]["value"] <= plain["figures"]["EOd"]["value"] + 1e-9
    table = table_of(grid, store)
    (block,) = table.blocks
    lines = {line.method: line for line in block.methods}
    against = {name: line.differences["EOd"].methods[0] for name, line in lines.items() if line.differences}
    assert against == {
        **dict.fromkeys(["dam", "erm", "lff", "lff_release", "control epoch chosen on test rows"], "control"),
        "dam epoch chosen on test rows": "control epoch chosen on test rows",
        "erm epoch chosen on test rows": "control epoch chosen on test rows",
    }
    circular = [name for name, line in lines.items() if line.circular]
    assert circular == [name for name in lines if name.endswith("on test rows")]
    assert [(lines[name].told, lines[name].best) for name in circular] == [(5, ())] * 3
    text, page = markdown(table), render(report_of(table))
    remark = "circular: epoch chosen by EOd of the test rows"
    assert f"| dam epoch chosen on test rows ({remark}) | 5 | 2 |" in text
    assert f"| dam epoch chosen on test rows ({remark}, against control epoch chosen on test rows) | 5 |" in text
    assert (
        page.count(f'<tr class="reference">\n<th scope="row">dam epoch chosen on test rows<span class="note">{remark}')
        == 2
    )
    assert "weight decay 0.1, schedule constant, warmup 0, max grad norm none" in text
    assert "- erm, lff, lff_release, erm epoch chosen on test rows: epochs 2, model vit-1x2." in text
    assert "Circular, as the test rows chose the epoch by their EOd, and no result: control epoch chosen on" in text


def test_a_cell_that_fails_is_recorded_and_does_not_stop_the_others(grid_of, tmp_path, cache, faces, monkeypatch):
    # More values than there are tokens: DAM refuses that when it meets the first batch.
    text = GRID.replace("methods: [erm, dam]", "methods: [{name: bad, method: dam, options: {values: 40}}, erm]")
    outcome = run_grid(grid_of("seeds=0", text=text), tmp_path / "out", Workplace("cpu", 1, cache))
    assert outcome == (0, 1, 1)
    bad, good = Store(tmp_path / "out").rows()
    assert bad["status"] == "failed"
    assert "aligns 40 values" in bad["error"]
    assert good["status"] == "done"
    table = table_of(grid_of("seeds=0", text=text), Store(tmp_path / "out"))
    assert "aligns 40 values" in markdown(table)
    monkeypatch.setenv("FACES", str(faces))
    command = ["bench", str(tmp_path / "grid.yaml"), "--out", str(tmp_path / "out"), "--set", "seeds=0"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--device", "cpu", "--cache", str(cache)])  # the bad one fails again
    assert ended.value.code == 1


def test_mistakes_are_found_before_anything_runs(grid_of, tmp_path):
    for text, message in [
        (GRID.replace("[erm, dam]", "[erm, damm]"), "Did you mean 'dam'"),
        (GRID.replace("[erm, dam]", "[erm, {method: dam, options: {value: 3}}]"), "Did you mean 'values'"),
        (GRID.replace("model: vit-2x2", "model: vit"), "there is no model 'vit'"),
        (GRID.replace("model: vit-2x2", "model: path:nowhere"), "^nowhere: expected a folder with a model"),
        (GRID.replace("width: 16", "widht: 16"), "Did you mean 'width'"),
        (GRID.replace("utkface:${FACES}", "utkfaces:${FACES}"), "Did you mean 'utkface'"),
        (GRID.replace("utkface:${FACES}", "utkface:${FACES}/nowhere"), "nowhere, where utkface should be"),
        (GRID.replace("epochs: 2", "epochs: 1.5"), "epochs is 1.5; expected a whole number of at least 1"),
        (GRID.replace("learning_rate: 1e-2", "learning_rate: -1"), "learning_rate is -1; expected a number above 0"),
        (
            GRID.replace("[erm, dam]", "[erm, {method: dam, options: {momentum: 2}}]"),
            "momentum is 2; expected a number",
        ),
    ]:
        with pytest.raises(InputError, match=message):
            run_grid(grid_of(text=text), tmp_path / "out")
    assert not (tmp_path / "out/results.jsonl").exists()


def test_data_and_groups_that_are_not_there_are_said_in_the_row(grid_of, tmp_path, cache):
    text = GRID.replace("group: white", "group: whit")
    assert run_grid(grid_of("seeds=0", "methods=erm", text=text), tmp_path / "out", Workplace()).failed == 1
    assert "Did you mean 'white'" in Store(tmp_path / "out").rows()[0]["error"]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("vit-2x3", {"width": 16}, "width is 16; expected a multiple of 3, its heads"),
        ("vit-2x2", {"image_size": 10, "patch_size": 4}, "image_size is 10; expected a multiple of 4, its patch_size"),
        ("vit-2x2", {"width": "abc"}, "width is 'abc'; expected a whole number of at least 1"),
        ("vit-2x2", {"mlp": 0}, "mlp is 0; expected a whole number"),
        ("vit-0x2", {}, "needs at least one layer and one head"),
    ],
)
def test_a_fresh_model_that_cannot_be_is_refused(name, settings, message):
    with pytest.raises(InputError, match=message):
        Recipe(name, ("0", "1"), settings).check()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_devices_that_are_not_there_are_refused():
    assert device_named("auto") == device_named("cpu") == torch.device("cpu")
    for device, message in [
        ("cuda", "sees no GPU here"),
        ("gpu", "'gpu'; expected cpu, cuda"),
        ("xla", "no xla device"),
    ]:
        with pytest.raises(InputError, match=message):
            device_named(device)


def test_a_fresh_vision_model_refuses_texts():
    with pytest.raises(UnsupportedModel, match="reads pictures"):
        Recipe("vit-2x2", ("a", "b")).build("text", 0)


def test_the_paper_s_backbone():
    with torch.device("meta"):
        model = Recipe("vit-8x8", ("a", "b")).build("image", 0)
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.hidden_size) == (8, 8, 768)
    assert (config.intermediate_size, config.image_size, config.patch_size) == (768, 64, 16)
    assert model.vit.embeddings.position_embeddings.shape == (1, 17, 768)


def test_last_encoder_cells_run_on_cached_features(grid_of, tmp_path):
    text = GRID.replace("{name: tiny, model", "{name: tiny, train: last_encoder, model")
    folder = tmp_path / "features"
    outcome = run_grid(grid_of("seeds=0", text=text), tmp_path / "out", Workplace("cpu", 1, folder))
    assert outcome == (0, 2, 0)
    about = [json.loads(file.read_text())["about"] for file in folder.glob("*/manifest.json")]
    # Train, validation and test, made once for both methods.
    assert sorted(entry["rows"] for entry in about if "layers" in entry) == [16, 16, 128]


def bench(out, grid, faces, cache, *more, **options):
    command = [sys.executable, "-m", "fairhead", "bench", str(grid), "--out", str(out), "--device", "cpu"]
    environment = {**os.environ, "FACES": str(faces), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--cache", str(cache), *more], env=environment, stderr=subprocess.PIPE, text=True, **options
    )


def test_a_run_that_was_killed_goes_on_and_loses_only_the_cell_in_flight(tmp_path, faces, cache, monkeypatch, capsys):
    (tmp_path / "grid.yaml").write_text(GRID)
    out = tmp_path / "out"
    results = out / "results.jsonl"
    first = bench(out, tmp_path / "grid.yaml", faces, cache, "--set", "epochs=20", stdout=subprocess.DEVNULL)
    try:
        while not (results.exists() and results.read_text().count("\n") >= 2):
            assert first.poll() is None, first.stderr.read()
            time.sleep(0.02)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
        first.stderr.close()
    before = {row["cell"]: row for row in Store(out).rows()}
    assert 2 <= len(before) < 4

    monkeypatch.setenv("FACES", str(faces))
    again = ["bench", str(tmp_path / "grid.yaml"), "--out", str(out), "--device", "cpu", "--cache", str(cache)]
    main([*again, "--set", "epochs=20"])
    said = capsys.readouterr().err
    assert f"{len(before)} were done before" in said
    assert f"{len(before) + 1} of 4 faces/tiny/" in said  # the count goes on too
    after = {row["cell"]: row for row in Store(out).rows()}
    assert len(after) == 4
    # What was done before the kill is what is there now, byte for byte.
    assert all(after[cell] == row for cell, row in before.items())
    assert (out / "table.html").exists()


def test_a_worker_that_is_killed_costs_its_cell_only(tmp_path, grid_of, cache):
    killed = []

    def kill_the_first(news):
        if not killed and news.stage == "training":
            (worker,) = multiprocessing.active_children()
            worker.kill()
            killed.append(news.cell.name)

    grid = grid_of("seeds=0", "epochs=30")
    outcome = run_grid(grid, tmp_path / "out", Workplace("cpu", 1, cache), kill_the_first)
    rows = {row["cell"]: row for row in Store(tmp_path / "out").rows()}
    assert outcome == (0, 1, 1)
    assert "SIGKILL" in rows[killed[0]]["error"]
    # Failed cells are run again.
    assert run_grid(grid, tmp_path / "out", Workplace("cpu", 1, cache)) == (1, 1, 0)


def test_the_command_says_what_is_wrong_in_one_line(tmp_path, faces, cache):
    (tmp_path / "grid.yaml").write_text(GRID.replace("plan:", "plam:"))
    process = bench(tmp_path / "out", tmp_path / "grid.yaml", faces, cache, stdout=subprocess.DEVNULL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said.count("\n") == 1
    assert "Did you mean 'plan'?" in said
