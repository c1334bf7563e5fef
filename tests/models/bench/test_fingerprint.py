"""Results are known by every setting that they depend on, written or not."""

import sys
from dataclasses import make_dataclass, replace

from made_faces import GRID, make_faces

from fairhead import mitigate as registry
from fairhead.bench import cell as fingerprints
from fairhead.bench.cell import fingerprint
from fairhead.bench.engines import Workplace
from fairhead.bench.grid import Backbone, Cell, Data, Method
from fairhead.bench.grid_file import read_grid
from fairhead.bench.results_folder import Store
from fairhead.bench.runner import run_grid
from fairhead.bench.table_figures import table_of
from fairhead.data import faces
from fairhead.models import fresh

CELL = Cell(Data("d", "utkface:x"), Backbone("b", "vit-2x2"), Method("jtt", "jtt"), 0, {"epochs": 1})


def test_what_is_written_out_and_what_is_left_to_a_default_are_the_same_result():
    written = replace(
        CELL,
        method=Method("jtt", "jtt", {"upweight": 50, "first_epochs": 1}),
        backbone=Backbone("b", "vit-2x2", settings={"width": 768, "patch_size": 16}),
        data=Data("d", "utkface:x", {"bias_rate": None, "groups": ["white", "race"]}),
        plan={"epochs": 1, "batch_size": 64, "precision": "no"},
    )
    assert written.settings() != CELL.settings()
    assert fingerprints.effective(written) == fingerprints.effective(CELL)
    assert fingerprint(written) == fingerprint(CELL)


def test_a_changed_default_is_another_result(monkeypatch):
    before = fingerprint(CELL)

    def changed(where, name, value):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            return fingerprint(CELL)

    def with_options(name, **options):
        return {**registry.METHODS, name: replace(registry.METHODS[name], options=options)}

    plan = make_dataclass("Plan", [("weight_decay", float, 0.1)], bases=(fingerprints.TrainingPlan,), frozen=True)
    found = [
        changed(registry, "METHODS", with_options("jtt", upweight=20)),
        changed(fingerprints, "TrainingPlan", plan),
        changed(fresh, "_FRESH_SETTINGS", {**fresh._FRESH_SETTINGS, "mlp": 3072}),
        changed(faces, "read_utkface", lambda path, *, drop_duplicates=False: None),
        changed(fingerprints, "REVISION", fingerprints.REVISION + 1),
    ]
    assert len({before, *found}) == 6
    assert fingerprint(CELL) == before
    # Another method's default is no concern of this one.
    assert changed(registry, "METHODS", with_options("dro", eta=0.9)) == before


def test_results_from_before_a_setting_came_are_known_and_its_use_is_another_result():
    arl = replace(CELL, method=Method("arl", "arl"))
    assert fingerprints.effective(arl)["method"]["options"] == {
        "pretrain": 250,
        "adversary_loss": "plain",
        "uses_label": True,
    }
    assert fingerprint(replace(arl, method=Method("arl", "arl", {"adversary": None}))) == fingerprint(arl)
    assert fingerprint(replace(arl, method=Method("arl", "arl", {"adversary": "vit-6x8"}))) != fingerprint(arl)


def test_how_a_step_is_run_counts_only_where_the_grid_says_so():
    assert "replay" not in fingerprints.effective(CELL)["plan"]
    assert fingerprint(replace(CELL, plan={"epochs": 1, "replay": False})) != fingerprint(CELL)


def test_rows_of_another_default_are_run_again(tmp_path, monkeypatch):
    (tmp_path / "grid.yaml").write_text(GRID)
    faces = make_faces(tmp_path / "faces")
    grid = read_grid(tmp_path / "grid.yaml", ["methods=erm,dam", "seeds=0", "epochs=1"], {"FACES": str(faces)})
    place = Workplace("cpu", 1, tmp_path / "cache")
    assert run_grid(grid, tmp_path / "out", place) == (0, 2, 0)
    row = Store(tmp_path / "out").rows()[1]
    assert row["settings"]["method"]["options"] == {}
    assert row["effective"]["method"]["options"]["momentum"] == 0.1
    dam = replace(registry.METHODS["dam"], options={"momentum": 0.2})
    monkeypatch.setattr(registry, "METHODS", {**registry.METHODS, "dam": dam})
    table = table_of(grid, Store(tmp_path / "out"))
    assert [line.method for line in table.blocks[0].methods] == ["erm"]
    # What is known without PyTorch is what was written.
    monkeypatch.setitem(sys.modules, "fairhead.bench.runner", None)
    table = table_of(grid, Store(tmp_path / "out"))
    assert [line.method for line in table.blocks[0].methods] == ["erm", "dam"]
