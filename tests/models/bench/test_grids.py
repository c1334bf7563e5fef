"""The grids that ship: they can be read, and all that they name exists."""

from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from fairhead.bench.cell import effective, fingerprint, method_of
from fairhead.bench.grid_file import read_grid, read_methods
from fairhead.data import reader_named
from fairhead.mitigate import method_named
from fairhead.train import TrainingPlan

EVERY = sorted(Path(str(files("fairhead.bench"))).glob("*.yaml"))
# Grids of methods for language models have methods alone: the command says on which model and data.
SHIPPED = [file for file in EVERY if "data" in yaml.safe_load(file.read_text(encoding="utf-8"))]
WHERE = {"FAIRHEAD_DATA": "/data", "FAIRHEAD_MODELS": "/models"}


def test_the_paper_s_tables_are_there():
    assert {"utkface", "celeba", "hatexplain", "multinli", "celeba-frozen", "ablation"} <= {f.stem for f in SHIPPED}


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_grid_names_what_exists(file):
    grid = read_grid(file, [], WHERE)
    assert grid.baseline in [m.name for m in grid.methods]
    assert len(grid.seeds) >= (3 if file.stem == "dam-verdict" else 5)  # that one repeats a paper's three
    for cell in grid.cells():
        method_of(cell)
        reader_named(cell.data.read.partition(":")[0])
        for path in (cell.data.read.partition(":")[2], cell.backbone.model.removeprefix("path:")):
            assert path.startswith(("/data/", "/models/", "vit-", "features:/data/"))
    # What the paper reports has the same columns for every method.
    for methods in grid.reported.values():
        assert len({tuple(values) for values in methods.values()}) == 1


@pytest.mark.parametrize("file", [file for file in EVERY if file not in SHIPPED], ids=lambda file: file.stem)
def test_a_grid_for_language_models_names_what_exists(file):
    methods = read_methods(file)
    assert len({method.name for method in methods}) == len(methods) > 1
    for method in methods:
        method_named(method.method).configure(**method.options)


def test_all_seven_methods_of_table_1_are_in_the_utkface_grid():
    content = yaml.safe_load(next(f for f in SHIPPED if f.stem == "utkface").read_text(encoding="utf-8"))
    names = [m if isinstance(m, str) else m["method"] for m in content["methods"]]
    assert names == list(content["reported"].popitem()[1])


def test_figure_2_sweeps_what_the_paper_sweeps():
    (file,) = (f for f in SHIPPED if f.stem == "tradeoff")
    swept = {"dam": "values", "kd": "share", "dro": "eta", "arl": "adversary", "jtt": "upweight"}
    found = {name: [] for name in swept}
    for entry in read_grid(file, [], WHERE).methods:
        if entry.method != "erm":
            found[entry.method].append(entry.options[swept[entry.method]])
    assert found == {
        "dam": [2, 4, 6],
        "kd": [0.3, 0.7, 1.0],
        "dro": [0.1, 0.3, 0.5],
        "arl": ["vit-2x8", "vit-4x8", "vit-6x8"],
        "jtt": [20, 50, 100],
    }


def test_dam_s_verdict_is_by_its_authors_recipe():
    """The released notebook: 10 + 1 layers, AdamW at 1e-4 with weight decay 0.1, 50 epochs of 256, nothing else."""
    grid = read_grid(next(f for f in SHIPPED if f.stem == "dam-verdict"), [], WHERE)
    cells = {cell.method.name: effective(cell) for cell in grid.cells()}
    recipe = {"epochs": 50, "batch_size": 256, "learning_rate": 1e-4, "weight_decay": 0.1}
    assert recipe.items() <= cells["dam"]["plan"].items()
    plan = TrainingPlan(**grid.plan)
    assert plan.max_grad_norm is None
    assert {plan.rate(step, 1000) for step in (0, 1, 500, 999)} == {1.0}
    assert cells["dam"]["backbone"] == cells["control"]["backbone"]
    assert cells["dam"]["backbone"]["model"] == "vit-10x8"
    assert {"layer": -1, "append": True, "eps": 0.0}.items() <= cells["dam"]["method"]["options"].items()
    # The control differs by DAM's parts alone.
    assert {k for k in cells["dam"] if cells["dam"][k] != cells["control"][k]} == {"method"}
    layer = cells["control"]["method"]["options"]
    assert (cells["control"]["method"]["name"], layer["heads"], layer["activation"]) == ("encoder_layer", None, "gelu")
    # Each of the three has its like whose epoch the test rows choose, and nothing else differs between them.
    for name in ("control", "dam", "erm"):
        other = cells[f"{name} epoch chosen on test rows"]
        assert other == {**cells[name], "selection": "test_eod"}


def test_results_are_known_wherever_the_data_lie():
    elsewhere = {"FAIRHEAD_DATA": "/mnt/data", "FAIRHEAD_MODELS": "/mnt/models"}
    for file in SHIPPED:
        here, there = read_grid(file, [], WHERE), read_grid(file, [], elsewhere)
        assert [fingerprint(c) for c in here.cells()] == [fingerprint(c) for c in there.cells()]
        assert here.cells()[0].data.read != there.cells()[0].data.read
