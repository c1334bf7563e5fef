"""The search of hyper-parameters: what is drawn, what is looked at, what is chosen, and what the table says of it."""

import json
import random
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
import torch
from made_faces import GRID, make_faces
from torch import nn

from fairhead.bench import runner
from fairhead.bench.cell import fingerprint, row_of, run_cell, run_trial
from fairhead.bench.engines import Workplace, work
from fairhead.bench.grid_file import read_grid
from fairhead.bench.results_folder import Store
from fairhead.bench.runner import PLAN_PRIORS, Place, choices, final_cells, run_grid, trial_cells
from fairhead.bench.table import markdown, report_of
from fairhead.bench.table_figures import table_of
from fairhead.cli import main
from fairhead.mitigate import method, names
from fairhead.records import Records
from fairhead.report import render
from fairhead.report.wording import plain_value
from fairhead.settings import Choice, ListOf, LogUniform, ShareOfEpochs, Uniform

SEARCHED = GRID.replace("[erm, dam]", "[erm, jtt]") + "search: {configs: 3, seeds: [7, 8]}\n"


@pytest.fixture(scope="module")
def faces(tmp_path_factory):
    return make_faces(tmp_path_factory.mktemp("faces"))


@pytest.fixture
def grid_of(tmp_path, faces):
    def read(*changes, text=SEARCHED):
        (tmp_path / "grid.yaml").write_text(text)
        return read_grid(tmp_path / "grid.yaml", changes, {"FACES": str(faces)})

    return read


@pytest.mark.parametrize("name", names("classifier"))
def test_every_draw_is_a_setting_that_the_method_takes(name):
    config = method(name)
    priors = getattr(config, "priors", {})
    known = {setting.name for setting in fields(config)}
    assert set(priors) <= known
    assert not set(priors) & set(PLAN_PRIORS["text"])
    for number in range(50):
        chance = random.Random(number)
        replace(config, **{option: prior.draw(chance, 6) for option, prior in priors.items()})


def test_the_priors_are_those_that_were_published():
    assert method("jtt").priors == {"first_epochs": ShareOfEpochs(0.2, 0.8), "upweight": LogUniform(0, 2.5, True)}
    assert method("lff").priors == {"q": Uniform(0.05, 0.95)}
    assert method("dro_cvar").priors == {"alpha": LogUniform(-2, 0)}
    assert method("kd").priors["share"] == Choice((0.3, 0.7, 1.0))
    assert method("group_dro").priors == {"step_size": LogUniform(-3, -1)}
    assert method("dfr").priors == {"strengths": ListOf(LogUniform(-2, 0.5))}
    assert PLAN_PRIORS["image"]["learning_rate"] == LogUniform(-4, -2)
    assert PLAN_PRIORS["text"]["learning_rate"] == LogUniform(-5.5, -4)
    assert method("erm").__class__.__dict__.get("priors") is None


def test_draws_spread_over_their_prior():
    drawn = [LogUniform(-4, -2).draw(random.Random(n), 1) for n in range(400)]
    powers = np.log10(drawn)
    assert -4 <= powers.min() < -3.9
    assert -2.1 < powers.max() <= -2
    assert abs(powers.mean() + 3) < 0.1
    epochs = {ShareOfEpochs(0.2, 0.8).draw(random.Random(n), 10) for n in range(200)}
    assert epochs == set(range(2, 9))


def test_a_reader_that_another_package_brings_is_searched_by_its_kind(tmp_path, monkeypatch, grid_of):
    text = "from fairhead.data import Reader\n"
    text += "".join(f"{kind} = Reader('my_{kind}', '{kind}', 'made_readers:read')\n" for kind in ("images", "texts"))
    (tmp_path / "made_readers.py").write_text(text + "def read(path, *, seed=0):\n    raise NotImplementedError\n")
    (tmp_path / "made-1.dist-info").mkdir()
    (tmp_path / "made-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: made\nVersion: 1\n")
    points = "[fairhead.data]\nmy_images = made_readers:images\nmy_texts = made_readers:texts\n"
    (tmp_path / "made-1.dist-info" / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    grid = grid_of()
    rates = {}
    for kind in ("images", "texts"):
        data = replace(grid.data[0], read=f"my_{kind}:{tmp_path}", options={})
        cells = trial_cells(replace(grid, data=(data,), search=replace(grid.search, configs=30)))
        rates[kind] = [cell.plan["learning_rate"] for cell in cells if cell.trial]
    # 10^-4 to 10^-2 for pictures, 10^-5.5 to 10^-4 for texts (SubpopBench)
    assert min(rates["images"]) >= 1e-4 >= max(rates["texts"])


def test_every_method_has_the_same_number_of_trials_and_the_same_learning_rates(grid_of):
    cells = trial_cells(grid_of())
    by_method = {name: [c for c in cells if c.method.name == name] for name in ("erm", "jtt")}
    assert [len(found) for found in by_method.values()] == [2 * 4, 2 * 4]
    assert [dict(c.plan) for c in by_method["erm"]] == [dict(c.plan) for c in by_method["jtt"]]
    # The first is the grid's own; the others differ from it and from each other.
    own, *drawn = (c for c in by_method["jtt"] if c.seed == 7)
    assert (own.method.options, own.plan["learning_rate"]) == ({}, 1e-2)
    assert len({(c.plan["learning_rate"], c.method.options["upweight"]) for c in drawn}) == 3
    assert all(1e-4 <= c.plan["learning_rate"] <= 1e-2 for c in drawn)
    # The same again tomorrow, others with another seed; the seeds of the grid have no part in it.
    assert trial_cells(grid_of()) == cells
    assert trial_cells(grid_of("seeds=5")) == cells
    assert trial_cells(grid_of("search.seed=1")) != cells
    assert {c.seed for c in cells} == {7, 8}


def test_what_the_command_sets_and_what_makes_a_variant_is_not_searched(grid_of):
    cells = trial_cells(grid_of("learning_rate=0.003"))
    assert {c.plan["learning_rate"] for c in cells} == {0.003}
    assert len({c.plan.get("weight_decay") for c in cells}) == 4
    text = SEARCHED.replace("[erm, jtt]", "[erm, dam_no_alignment, dam_release_frozen]")
    options = {c.method.name: c.method.options for c in trial_cells(grid_of(text=text)) if c.trial}
    assert options["dam_no_alignment"] == {}
    assert set(options["dam_release_frozen"]) == {"alignment_weight"}


def test_a_trial_looks_at_validation_rows_and_at_no_others(grid_of, tmp_path, monkeypatch):
    cell = trial_cells(grid_of())[0]
    looked = []
    from fairhead.bench import cell as module

    monkeypatch.setattr(module, "predict", lambda model, part, **more: looked.append(part) or torch.eye(2)[part.labels])
    row, records = run_trial(cell, "cpu", tmp_path)
    (part,) = looked
    assert len(part) == row["rows"]["validation"] == len(records)
    assert "test" not in row["rows"]
    assert "figures" not in row
    assert row["validation"] == {"accuracy": 1.0, "worst_class": 1.0}
    assert row["trial"] == 0
    # The same training as the cell that it is a trial of, on the same seed.
    done = run_cell(replace(cell, trial=None), "cpu", tmp_path)
    assert done.row["history"] == row["history"]
    assert not {*done.records.id} & {*records.id}
    assert done.row["fingerprint"] != row["fingerprint"]


def test_a_trial_whose_loss_is_not_finite_is_a_result_with_a_cost(grid_of, tmp_path, monkeypatch):
    from fairhead.bench import cell as module

    class Broken(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, pixel_values, labels=None):
            output = self.model(pixel_values=pixel_values, labels=labels)
            if labels is not None:
                output.loss = output.loss * float("nan")
            return output

    built = module._built
    monkeypatch.setattr(module, "_built", lambda *args: Broken(built(*args)))
    row, records = run_trial(trial_cells(grid_of())[0], "cpu", tmp_path)
    assert records is None
    assert (row["status"], row["diverged"]) == ("failed", True)
    assert "the loss was nan at step 1" in row["error"]
    assert row["cost"]["seconds"] > 0


def answers(right, group_right):
    """Records of 80 rows, 20 of each class and group: so many of them right, and so many in class 1, group b."""
    rows = [(y, g) for y in (0, 1) for g in ("a", "b") for _ in range(20)]
    label = np.array([y for y, _ in rows])
    group = np.array([g for _, g in rows])
    prediction = label.copy()
    for cell, hits in (((0, "a"), right), ((0, "b"), right), ((1, "a"), right), ((1, "b"), group_right)):
        inside = np.flatnonzero((label == cell[0]) & (group == cell[1]))
        prediction[inside[hits:]] = 1 - label[inside[hits:]]
    return Records.from_arrays(
        label.astype(str), prediction.astype(str), groups={"white": group}, id=np.arange(len(rows)).astype(str)
    )


def settle(store, cell, right=None, group_right=None, seconds=1.0):
    """Put a trial into the store as if it had run; without figures it has failed."""
    cost = {"cost": {"seconds": seconds, "energy_wh": 0.5}}
    if right is None:
        store.add({**row_of(cell, "failed"), "error": "NaN", "diverged": True, **cost})
        return
    records = answers(right, group_right)
    hits = records.label.codes == records.prediction.codes
    by_class = [hits[records.label.codes == y].mean() for y in (0, 1)]
    scores = {"accuracy": float(hits.mean()), "worst_class": float(min(by_class))}
    more = {"validation": scores, "classes": ["0", "1"], "group": "white", **cost}
    store.add({**row_of(cell, "done"), **more}, records)


def test_the_best_on_the_validation_rows_is_chosen_and_with_groups_apart(grid_of, tmp_path):
    grid, store = grid_of("search.seeds=7"), Store(tmp_path / "out")
    # Of jtt: 1 has the best worst class, 2 is best for the worst group, 3 diverged. Of erm: all alike.
    jtt = {0: (14, 12), 1: (20, 10), 2: (14, 15), 3: (None, None)}
    for cell in trial_cells(grid):
        if cell.method.name == "jtt":
            assert choices(grid, store).get(Place("faces", "tiny", "jtt")) is None
            settle(store, cell, *jtt[cell.trial])
        else:
            settle(store, cell, 15, 15)
    (found,) = choices(grid, store)[Place("faces", "tiny", "jtt")]
    assert (found.config, found.score, found.own_score) == (1, 30 / 40, 26 / 40)
    assert (found.trials, found.failed, found.seconds, found.watt_hours) == (4, 1, 4.0, 2.0)
    (same,) = choices(grid, store)[Place("faces", "tiny", "erm")]
    assert same.config == 0
    assert same.values == {}
    cells = final_cells(grid, store)
    trial = next(c for c in trial_cells(grid) if c.method.name == "jtt" and c.trial == 1)
    assert [c.name for c in cells] == ["faces/tiny/erm/0", "faces/tiny/jtt/0", "faces/tiny/erm/1", "faces/tiny/jtt/1"]
    assert cells[1].method.options == trial.method.options == {k: found.values[k] for k in trial.method.options}
    assert cells[1].plan == trial.plan
    assert not any(c.method.chosen_with_groups for c in cells)
    # With groups: another configuration of jtt, shown apart; erm keeps its own and has no second line.
    grid = grid_of("search.seeds=7", "search.with_groups=true")
    plain, with_groups = choices(grid, store)[Place("faces", "tiny", "jtt")]
    assert plain == found
    assert (with_groups.config, with_groups.score, with_groups.with_groups) == (2, 14 / 20, True)
    names = {c.method.name: c.method.chosen_with_groups for c in final_cells(grid, store)}
    assert names == {"erm": False, "jtt": False, "jtt chosen with groups": True}


def test_the_score_is_the_mean_over_the_search_s_seeds(grid_of, tmp_path):
    grid, store = grid_of(), Store(tmp_path / "out")
    for cell in trial_cells(grid):
        right = {(1, 7): 20, (1, 8): 10, (2, 7): 16, (2, 8): 16}.get((cell.trial, cell.seed), 12)
        settle(store, cell, right, right)
    (found,) = choices(grid, store)[Place("faces", "tiny", "erm")]
    assert (found.config, found.score) == (2, 0.8)


def test_what_a_search_cannot_choose_is_named_and_trials_that_diverged_are_taken_in(grid_of, tmp_path):
    grid, store = grid_of("search.seeds=7"), Store(tmp_path / "out")
    for cell in trial_cells(grid):
        settle(store, cell, *((15, 15) if cell.method.name == "erm" else (None, None)))
    for cell in final_cells(grid, store):
        made = {"made_with": {"device": "cpu"}, "rows": {"test": 80}, "stages": [], "classes": ["0", "1"]}
        cost = {"seconds": 1.0, "energy_wh": None, "gpu_allocated_mib": None, "peak_rss_mib": 1.0, "shared_by": 1}
        store.add({**row_of(cell, "done"), **made, "group": "white", "cost": cost}, answers(15, 15))
    table = table_of(grid, store)
    assert [line.method for line in table.blocks[0].methods] == ["erm"]
    said = "Not shown, as trials are missing or all have failed: faces/tiny/jtt."
    assert said in markdown(table)
    assert said in render(report_of(table))
    other = Store(tmp_path / "other")
    assert other.take_in(store) == len(store.rows()) == 10
    assert other.take_in(store) == 0
    assert choices(grid, other) == choices(grid, store)


def test_a_searched_grid_from_end_to_end(faces, tmp_path, monkeypatch, capsys):
    text = SEARCHED.replace("configs: 3, seeds: [7, 8]", "configs: 2, seeds: [7]")
    (tmp_path / "grid.yaml").write_text(text)
    command = ["bench", str(tmp_path / "grid.yaml"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    command += ["--cache", str(tmp_path / "cache")]
    monkeypatch.setenv("FACES", str(faces))

    def ended_after(most, cells, workplace):
        """In this process, which is interrupted where there is more to do."""
        for cell in cells[:most]:
            yield work(cell, workplace, lambda news: None, lambda: 1)
        if len(cells) > most:
            raise KeyboardInterrupt

    # In the middle of the trials; what is done stays done.
    monkeypatch.setattr(runner, "run_cells", partial(ended_after, 2))
    with pytest.raises(SystemExit, match="130"):
        main(command)
    assert len(Store(tmp_path / "out").rows()) == 2
    capsys.readouterr()
    monkeypatch.setattr(runner, "run_cells", partial(ended_after, 10))
    main(command)
    said = capsys.readouterr()
    assert "8 cells done, 0 failed, 2 were done before" in said.err
    assert "trials a method" in said.out
    page = (tmp_path / "out" / "table.html").read_text(encoding="utf-8")
    assert "Search of hyper-parameters" in page
    content = json.loads((tmp_path / "out" / "table.json").read_text(encoding="utf-8"))
    assert content["provenance"]["selection"] == "epoch and configuration by validation worst-class accuracy"
    grid = read_grid(tmp_path / "grid.yaml", [], {"FACES": str(faces)})
    store = Store(tmp_path / "out")
    rows = {row["cell"]: row for row in store.rows()}
    for line in content["blocks"][0]["methods"]:
        trials = [row for name, row in rows.items() if f"/{line['method']}/trial " in name]
        assert len(trials) == line["search"]["trials"] == 3
        assert line["search"]["score"] == max(row["validation"]["worst_class"] for row in trials)
        assert line["search"]["seconds"] == pytest.approx(sum(row["cost"]["seconds"] for row in trials))
        final = rows[f"faces/tiny/{line['method']}/0"]
        trial = rows[f"faces/tiny/{line['method']}/trial {line['search']['config']}/7"]
        for part in ("method", "plan"):
            assert final["effective"][part] == trial["effective"][part]
    # Nothing is left to do, and the table can be made again.
    assert run_grid(grid, tmp_path / "out", Workplace()) == (10, 0, 0)
    table = table_of(grid, store)
    shown = markdown(table).partition("Search of hyper-parameters")[2]
    for line in table.blocks[0].methods:
        words = [f"{name.replace('_', ' ')} {plain_value(value)}" for name, value in line.search.values.items()]
        (row,) = (row for row in shown.split("\n") if row.startswith(f"| {line.method} "))
        assert (", ".join(words).replace("_", " ") or "as the grid has it") in row
    assert render(report_of(table)).count("<caption>Search of hyper-parameters") == 1
    assert all(fingerprint(cell) == rows[cell.name]["fingerprint"] for cell in final_cells(grid, store))
