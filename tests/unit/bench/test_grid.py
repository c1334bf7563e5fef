"""Grids: what is read, and how mistakes in them are answered."""

import gzip
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fairhead.bench.grid import Search
from fairhead.bench.grid_file import grid_path, read_grid, read_methods
from fairhead.bench.results_folder import Store
from fairhead.errors import InputError
from fairhead.records import Records

GOOD = """
title: T
data:
  - {name: natural, read: "utkface:${D}/u.zip", group: white, split_by_seed: true}
  - {name: biased, read: "utkface:${D}/u.zip", options: {bias_rate: 0.9}, plan: {epochs: 7}}
backbones:
  - vit-8x8
  - {name: LE, model: "path:${M}/dino", train: last_encoder, plan: {learning_rate: 3e-4}}
methods: [erm, {name: dam-4, method: dam, options: {values: 4}, data_options: {biased: {values: 6}}}]
references: [group_dro]
seeds: [0, 1]
plan: {epochs: 30, batch_size: 256, learning_rate: 1e-4}
"""
WHERE = {"D": "data", "M": "models"}


@pytest.fixture
def grid_of(tmp_path):
    def read(text=GOOD, changes=(), environment=WHERE):
        (tmp_path / "grid.yaml").write_text(text)
        return read_grid(tmp_path / "grid.yaml", changes, environment)

    return read


def test_a_grid_is_the_product_of_its_axes(grid_of):
    cells = grid_of().cells()
    assert len({cell.name for cell in cells}) == len(cells) == 2 * 2 * 3 * 2
    assert len({json.dumps(cell.settings()) for cell in cells}) == len(cells)
    # Cells that share data stand together.
    assert [cell.name for cell in cells[:4]] == [
        "natural/vit-8x8/erm/0",
        "natural/vit-8x8/dam-4/0",
        "natural/vit-8x8/group_dro/0",
        "natural/vit-8x8/erm/1",
    ]
    assert [cell.method.uses_groups for cell in cells[:3]] == [False, False, True]


def test_plans_of_data_and_backbones_come_before_the_grid_s_and_the_command_s_before_all(grid_of):
    by_name = {cell.name: cell for cell in grid_of().cells()}
    assert by_name["natural/vit-8x8/erm/0"].plan == {"epochs": 30, "batch_size": 256, "learning_rate": 1e-4}
    assert by_name["biased/LE/erm/0"].plan == {"epochs": 7, "batch_size": 256, "learning_rate": 3e-4}
    assert all(cell.plan["epochs"] == 1 for cell in grid_of(changes=["epochs=1"]).cells())


def test_a_bare_no_of_yaml_is_a_precision(grid_of):
    for changes in (["precision=no"], ["precision='no'"]):
        assert grid_of(changes=changes).cells()[0].plan["precision"] == "no"
    assert grid_of(GOOD.replace("epochs: 30", "precision: no, epochs: 30")).plan["precision"] == "no"


def test_options_of_a_method_may_depend_on_the_data(grid_of):
    options = {c.name: c.settings()["method"]["options"] for c in grid_of().cells()}
    assert options["natural/vit-8x8/dam-4/0"] == {"values": 4}
    assert options["biased/vit-8x8/dam-4/0"] == {"values": 6}


def test_settings_on_the_command_line(grid_of):
    grid = grid_of(changes=["seeds=3,4", "limit=50", "methods=erm", "data=biased", "backbones=vit-8x8", "n_boot=300"])
    assert [cell.name for cell in grid.cells()] == ["biased/vit-8x8/erm/3", "biased/vit-8x8/erm/4"]
    assert grid.data[0].limit == 50
    assert grid_of(GOOD.replace("seeds: [0, 1]", "seeds: [1, 0, 1]")).seeds == (1, 0)
    assert grid.n_boot == 300
    assert grid_of(changes=["limit=50"]).cells()[0].settings() != grid_of().cells()[0].settings()


def test_references_are_chosen_apart_from_the_methods_or_left_out(grid_of):
    names = [[m.name for m in grid_of(changes=[c]).methods] for c in ("references=", "references=group_dro")]
    assert names == [["erm", "dam-4"], ["erm", "dam-4", "group_dro"]]
    with pytest.raises(InputError, match="references: there is no 'erm'; there are group_dro"):
        grid_of(changes=["references=erm"])
    with pytest.raises(InputError, match="methods= names none"):
        grid_of(changes=["methods="])


def test_an_epoch_chosen_with_groups_is_a_reference(grid_of):
    both = "{name: both, method: dfr, selection: worst_group}"
    text = GOOD.replace(
        "references: [group_dro]", f"references: [group_dro, {{method: erm, selection: worst_group}}, {both}]"
    )
    grid = grid_of(text)
    remarks = {method.name: method.remark for method in grid.methods}
    assert remarks == {
        "erm": "",
        "dam-4": "",
        "group_dro": "trains with groups",
        "erm epoch chosen with groups": "epoch chosen with groups",
        "both": "trains with groups, epoch chosen with groups",
    }
    assert [c.settings()["selection"] for c in grid.cells()[:4]] == ["accuracy"] * 3 + ["worst_group"]
    with pytest.raises(
        InputError, match=r"methods\[0\].selection: worst_group needs groups; list this method under ref"
    ):
        grid_of(GOOD.replace("[erm,", "[{method: erm, selection: worst_group},"))
    with pytest.raises(InputError, match="selection is 'accuracy'; expected worst_group or test_eod or nothing"):
        grid_of(GOOD.replace("[group_dro]", "[{method: erm, selection: accuracy}]"))


def test_an_epoch_that_the_test_rows_choose_is_a_reference_and_called_circular(grid_of):
    text = GOOD.replace("[group_dro]", "[{method: erm, selection: test_eod}]")
    method = grid_of(text).methods[-1]
    assert (method.name, method.circular, method.uses_groups, method.told) == (
        "erm epoch chosen on test rows", True, True, 5
    )  # fmt: skip
    assert method.remark == "circular: epoch chosen by EOd of the test rows"
    assert {cell.settings()["selection"] for cell in grid_of(text).cells()} == {"accuracy", "test_eod"}
    with pytest.raises(InputError, match=r"methods\[0\].selection: test_eod needs groups; list this method under ref"):
        grid_of(GOOD.replace("[erm,", "[{method: erm, selection: test_eod},"))
    with pytest.raises(
        InputError, match=r"'erm epoch chosen on test rows' chooses by test rows, and a search looks at"
    ):
        grid_of(text, ["search=2"])
    with pytest.raises(InputError, match="selection is 'test_eod'; expected accuracy or worst_class"):
        grid_of(GOOD + "selection: test_eod\n")


def test_a_method_may_have_a_model_of_its_own(grid_of):
    grid = grid_of(GOOD.replace("[erm,", "[erm, {name: small, method: erm, model: vit-2x2},"))
    models = {cell.name: cell.settings()["backbone"]["model"] for cell in grid.cells() if cell.seed == 0}
    assert [models[f"natural/vit-8x8/{name}/0"] for name in ("erm", "small", "dam-4")] == [
        "vit-8x8",
        "vit-2x2",
        "vit-8x8",
    ]
    assert models["natural/LE/small/0"] == "vit-2x2"
    with pytest.raises(InputError, match=r"methods\[0\].model is 'path:x'; expected a fresh one, such as vit-8x8"):
        grid_of(GOOD.replace("[erm,", "[{method: erm, model: 'path:x'},"))


def test_a_method_may_vary_and_have_a_plan_of_its_own(grid_of):
    varied = "{method: dro, options: {power: 2}, vary: {eta: [0.1, 0.3], plan.learning_rate: [1e-3, 1e-2]}}"
    grid = grid_of(GOOD.replace("[erm,", f"[erm, {varied}, {{name: slow, method: erm, plan: {{epochs: 99}}}},"))
    found = {method.name: (dict(method.options), dict(method.plan)) for method in grid.methods}
    assert list(found)[1:5] == [
        "dro eta=0.1 learning_rate=1e-3",
        "dro eta=0.1 learning_rate=1e-2",
        "dro eta=0.3 learning_rate=1e-3",
        "dro eta=0.3 learning_rate=1e-2",
    ]
    assert found["dro eta=0.3 learning_rate=1e-2"] == ({"power": 2, "eta": 0.3}, {"learning_rate": 1e-2})
    plans = {cell.method.name: cell.plan for cell in grid.cells() if cell.data.name == "biased"}
    assert plans["slow"]["epochs"] == 99
    assert plans["erm"]["epochs"] == 7
    with pytest.raises(InputError, match=r"methods\[1\].vary.eta is 0.1; expected a list"):
        grid_of(GOOD.replace("[erm,", "[erm, {method: dro, vary: {eta: 0.1}},"))
    with pytest.raises(InputError, match=r"vary has the unknown key 'learning_rat'.*Did you mean 'learning_rate'"):
        grid_of(GOOD.replace("[erm,", "[erm, {method: dro, vary: {plan.learning_rat: [1]}},"))


def test_a_grid_of_language_models_is_sent_to_its_command(grid_of, tmp_path):
    with pytest.raises(InputError, match=r"klaad is for language models; run the grid with fairhead mitigate klaad"):
        grid_of(GOOD.replace("[erm,", "[klaad,"))
    assert [method.name for method in read_methods(grid_path("klaad-study"))][2:] == [
        "klaad-strong",
        "klaad-strong-lr1e-4",
    ]
    assert len(read_methods(grid_path("klaad-weights"))) == 81
    (tmp_path / "grid.yaml").write_text("title: T\nmethods: [erm]")
    with pytest.raises(InputError, match=r"erm is not for language models: run the grid with fairhead bench"):
        read_methods(tmp_path / "grid.yaml")
    with pytest.raises(InputError, match=r"there is no grid 'klad-study'.*Did you mean 'klaad-study'"):
        grid_path("klad-study")


def test_a_variable_is_needed_only_by_what_is_left_in_the_grid(grid_of):
    assert grid_of().data[0].read == "utkface:data/u.zip"
    with pytest.raises(InputError, match="variable M is not set"):
        grid_of(environment={"D": "data"})
    assert grid_of(changes=["backbones=vit-8x8"], environment={"D": "data"}).cells()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("plan:", "plann:", r"unknown key 'plann'.*Did you mean 'plan'\?"),
        ("epochs: 30", "epoch: 30", r"plan has the unknown key 'epoch'.*Did you mean 'epochs'\?"),
        ("split_by_seed", "split_by_sed", r"data\[0\] has the unknown key 'split_by_sed'.*'split_by_seed'"),
        ("train: last_encoder", "train: last", r"backbones\[1\]: train is 'last'; expected all or last_encoder"),
        ("title: T", "title: [1]", r"title is \[1\]; expected text"),
        (
            "seeds: [0, 1]",
            "seeds: [0, -1]",
            r"seeds is \[0, -1\]; expected a list, each entry a whole number from 0 to 4,294,967,295",
        ),
        ("seeds: [0, 1]", "seeds: []", "has no 'seeds', which it needs"),
        ("seeds: [0, 1]", "", "has no 'seeds'"),
        ("seeds: [0, 1]", "seeds: [0]\nlimit: 0", r"data\[0\]: limit is 0; expected a whole number of at least 1"),
        ("name: biased", "name: natural", "data has 'natural' twice"),
        ("name: natural", "name: a/b", "names files"),
        ('read: "utkface:${D}/u.zip", group', "read: u.zip, group", "expected reader:path"),
        ("learning_rate: 1e-4", "learning_rate: fast", "plan: learning_rate is 'fast'; expected a number above 0"),
        ("title: T", "title: [", "is not YAML"),
        ("split_by_seed: true", "split_by_seed: maybe", r"data\[0\]: split_by_seed is 'maybe'; expected true or false"),
        ("group: white", "group: [white]", r"data\[0\]: group is \['white'\]; expected text or nothing"),
        (
            "data_options: {biased",
            "data_options: {baised",
            r"'dam-4' has data_options for 'baised'.*Did you mean 'biased'",
        ),
        (
            "plan: {epochs: 30,",
            "selection: test\nplan: {epochs: 30,",
            "selection is 'test'; expected accuracy or worst_class",
        ),
    ],
)
def test_mistakes_name_their_place(grid_of, old, new, message):
    assert old in GOOD
    with pytest.raises(InputError, match=message):
        grid_of(GOOD.replace(old, new, 1))


def test_a_search_is_read_and_changed_on_the_command_line(grid_of):
    assert grid_of().search is None
    assert grid_of().selection == "accuracy"
    searched = grid_of(GOOD + "search: {configs: 12, seeds: [5, 6]}\n")
    assert searched.search == Search(12, 0, (5, 6))
    assert searched.selection == "worst_class"
    assert searched.size == 2 * 2 * 3 * (2 + 13 * 2)
    assert grid_of(GOOD + "search: 12\nselection: accuracy\n").selection == "accuracy"
    changed = grid_of(GOOD + "search: {configs: 12, seeds: [5, 6]}\n", ["search=3", "search.with_groups=true"])
    assert changed.search == Search(3, 0, (5, 6), with_groups=True)
    # A baseline may be left out of a part of the grid.
    assert grid_of(changes=["baseline=erm", "methods=dam-4"]).baseline == "erm"
    # Results without a search are what they were.
    assert grid_of(changes=["search=3"]).cells()[0].plan == grid_of().cells()[0].plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("epoch=1", "Did you mean 'epochs'"),
        ("epochs", "--set takes key=value"),
        ("methods=dma-4", "Did you mean 'dam-4'"),
        ("seeds=a", r"--set: seeds is \['a'\]; expected a list, each entry a whole number"),
        ("limit=-3", "--set: limit is -3; expected a whole number of at least 1"),
        ("limit=0", "--set: limit is 0; expected a whole number of at least 1"),
        ("metrics=EOd,acuracy", "metrics has 'acuracy'.*Did you mean 'accuracy'"),
        ("n_boot=3", "--set: n_boot is 3; expected a whole number of at least 100"),
        ("baseline=emr", "baseline is 'emr'; expected one of its methods: erm, dam-4, group_dro. Did you mean 'erm'"),
        ("search=0", "--set search: configs is 0; expected a whole number of at least 1"),
        ("search=many", "search is 'many'; expected a mapping"),
        ("search.seeds=0", "seed 0 is one of the grid and one of its search"),
        ("search.with_groups=maybe", "with_groups is 'maybe'; expected true or false"),
        ("search.config=3", "Did you mean 'search.configs'"),
        ("n_boot=[", r"--set n_boot is '\[', which cannot be read"),
        ("plan=5", "--set plan is 5; expected a mapping"),
        ("plan={epoch: 1}", "Did you mean 'epochs'"),
        ("metrics=[[EOd]]", r"--set: metrics is \[\['EOd'\]\]; expected a list, each entry text"),
        ("reported=x", "--set: reported is 'x'; expected names, each with a value"),
    ],
)
def test_mistakes_on_the_command_line(grid_of, change, message):
    with pytest.raises(InputError, match=message):
        grid_of(changes=[change])


def test_a_grid_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_grid(tmp_path / "none.yaml")


def a_row(cell="d/b/erm/0", fingerprint="ab", **more):
    return {"cell": cell, "fingerprint": fingerprint, "status": "done", "classes": ["NA", "1"], **more}


def some_records(n=20, seed=0):
    rng = np.random.default_rng(seed)
    classes = np.array(["NA", "1"])
    return Records.from_arrays(
        classes[rng.integers(0, 2, n)],
        scores=np.round(rng.random(n), 7),
        groups={"g": np.array(["None", "b"])[rng.integers(0, 2, n)]},
        id=[f"{i:03}" for i in range(n)],
        classes=["NA", "1"],
    )


def test_records_come_back_as_they_were(tmp_path):
    records = some_records()
    Store(tmp_path).add(a_row(), records)
    store = Store(tmp_path)
    again = store.records(store.rows()[0])
    assert again.classes == records.classes
    assert again.label.values().tolist() == records.label.values().tolist()
    assert again.prediction.values().tolist() == records.prediction.values().tolist()
    assert again.scores.tolist() == records.scores.tolist()
    assert again.groups["g"].values().tolist() == records.groups["g"].values().tolist()
    assert again.id.tolist() == records.id.tolist()


def test_a_line_cut_short_is_left_out_and_does_not_swallow_the_next(tmp_path):
    store = Store(tmp_path)
    store.add(a_row(), some_records())
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"cell": "d/b/dam/0", "finger')
    assert [row["cell"] for row in store.rows()] == ["d/b/erm/0"]
    store.add(a_row("d/b/jtt/0"), some_records())
    assert [row["cell"] for row in store.rows()] == ["d/b/erm/0", "d/b/jtt/0"]


def test_a_row_without_its_records_does_not_count(tmp_path):
    store = Store(tmp_path)
    store.add(a_row(), some_records())
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write(json.dumps(a_row("d/b/dam/0")) + "\n")
    assert [row["cell"] for row in store.rows()] == ["d/b/erm/0"]


def test_every_cell_has_a_file_of_its_own_inside_the_folder(tmp_path):
    store = Store(tmp_path / "out")
    rows = [a_row(name) for name in ("a/b c/erm/0", "a b/c/erm/0", "../../erm/0", "a/b/erm/trial 1/0")]
    for seed, row in enumerate(rows):
        store.add(row, some_records(seed=seed))
    assert [store.records(row).scores.tolist() for row in store.rows()] == [
        some_records(seed=seed).scores.tolist() for seed in range(4)
    ]
    assert len(list((tmp_path / "out" / "records").iterdir())) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_line_that_was_cut_short_and_one_without_records_do_not_count(tmp_path):
    store, names = Store(tmp_path), ("d/b/erm/0", "d/b/dam/0")
    for seed, name in enumerate(names):
        store.add(a_row(name), some_records(seed=seed))
    lines = [json.dumps(a_row(name)) for name in (*names, "d/b/lost/0")]
    (tmp_path / "results.jsonl").write_text("\n".join([lines[0], '{"cell": "d/b/cut/0", "fin', *lines[1:], ""]))
    assert [row["cell"] for row in store.rows()] == list(names)
    store.add(a_row("d/b/jtt/0"), some_records(seed=2))
    store.add(a_row("d/b/dam/0"), some_records(seed=3))  # run again: the new records count
    found = {row["cell"]: store.records(row).scores.tolist() for row in store.rows()}
    seeds = {"d/b/erm/0": 0, "d/b/dam/0": 3, "d/b/jtt/0": 2}
    assert found == {name: some_records(seed=seed).scores.tolist() for name, seed in seeds.items()}


def test_the_latest_row_of_a_cell_counts(tmp_path):
    store = Store(tmp_path)
    store.add({**a_row(), "status": "failed", "error": "no"})
    assert store.rows()[0]["status"] == "failed"
    store.add(a_row(), some_records())
    assert [row["status"] for row in store.rows()] == ["done"]


def test_other_settings_of_a_cell_do_not_hide_what_was_there(tmp_path):
    store = Store(tmp_path)
    store.add(a_row(), some_records())
    store.add({**a_row(), "fingerprint": "other"}, some_records(seed=1))
    store.add({**a_row(), "fingerprint": "third", "status": "failed", "error": "no"})
    assert [row["fingerprint"] for row in store.rows()] == [a_row()["fingerprint"], "other", "third"]
    assert [store.records(row).scores.tolist() for row in store.rows()[:2]] == [
        some_records(seed=seed).scores.tolist() for seed in (0, 1)
    ]


def test_a_new_row_has_its_own_records_and_not_those_of_a_lost_one(tmp_path):
    store = Store(tmp_path)
    store.add(a_row(), some_records())
    store.add(a_row("d/b/dam/0"), some_records(seed=2))
    (tmp_path / "results.jsonl").unlink()
    store.add(a_row(), some_records(seed=1))
    (row,) = store.rows()
    assert store.records(row).scores.tolist() == some_records(seed=1).scores.tolist()
    assert store.records(a_row("d/b/dam/0")).scores.tolist() == some_records(seed=2).scores.tolist()


def test_a_folder_has_one_writer_at_a_time_and_readers_as_they_like(tmp_path):
    a, b = Store(tmp_path / "a"), Store(tmp_path / "b")
    b.add(a_row(), some_records())
    with a.alone():
        with ThreadPoolExecutor(1) as pool, pytest.raises(InputError, match=r"another run .*a'.*--take-in"):
            pool.submit(Store(tmp_path / "a").take_in, b).result()
        a.add(a_row("d/b/dam/0"), some_records())
        assert [row["cell"] for row in Store(tmp_path / "a").rows()] == ["d/b/dam/0"]
    assert a.take_in(b) == 1


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(InputError, match="cannot be written"), Store(tmp_path).alone():
        pass


def test_results_of_several_folders_are_put_together(tmp_path):
    here, there = Store(tmp_path / "here"), Store(tmp_path / "there")
    here.add(a_row(), some_records())
    there.add(a_row(), some_records(seed=1))
    there.add(a_row("d/b/dam/0"), some_records(seed=2))
    there.add({**a_row("d/b/jtt/0"), "status": "failed", "error": "no"})
    assert here.take_in(there) == 1
    assert here.take_in(there) == 0
    rows = {row["cell"]: row for row in here.rows()}
    assert set(rows) == {"d/b/erm/0", "d/b/dam/0"}
    assert here.records(rows["d/b/dam/0"]).scores.tolist() == some_records(seed=2).scores.tolist()
    assert here.records(rows["d/b/erm/0"]).scores.tolist() == some_records().scores.tolist()


def test_results_that_are_not_whole_are_refused_by_name(tmp_path):
    store = Store(tmp_path)
    store.add(a_row(), some_records())
    (row,), (file,) = store.rows(), (tmp_path / "records").iterdir()
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"no archive", gzip.compress(b"id,label\n1,NA\n")):
        file.write_bytes(content)
        with pytest.raises(InputError, match=r"erm~0\.ab\.csv\.gz (does not hold the records|cannot be read)"):
            store.records(row)
    for field in ("fingerprint", "status"):
        (tmp_path / "results.jsonl").write_text(json.dumps({k: v for k, v in a_row().items() if k != field}) + "\n")
        with pytest.raises(InputError, match=f"results.jsonl, line 1: the result of d/b/erm/0 lacks '{field}'"):
            Store(tmp_path).rows()
    (tmp_path / "results.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(InputError, match="is not a file of results"):
        store.rows()
