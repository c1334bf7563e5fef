"""Gains of heads: a planted head that carries a shortcut is turned down, and the gains are an ordinary edit."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from made_vit import HEADS, LAYERS, PLANTED, pictures, planted_vit
from scipy.special import expit
from scipy.stats import binomtest
from scipy.stats.contingency import association

from fairhead.errors import InputError
from fairhead.locate.decompose import Decomposer
from fairhead.locate.directions import classifier_task, concept_from_images
from fairhead.locate.edits import HeadEdits
from fairhead.locate.engine import find_dose, group_aware_gains
from fairhead.locate.gains import _contrast, _Objective, learn_gains, learn_group_aware_gains
from fairhead.locate.gap_question import GapQuestion
from fairhead.locate.head_features import collect
from fairhead.locate.head_maps import Head, group_cells
from fairhead.locate.locate_settings import LocatePlan
from fairhead.locate.passes import RowPasses
from fairhead.locate.rows import SURE, Evaluation, halves_of


def batches_of(pixels, size=100):
    return lambda start=0: ({"pixel_values": pixels[i : i + size]} for i in range(start, len(pixels), size))


def asked():
    model = planted_vit()
    pixels, bright, labels = pictures()
    decomposer, task = Decomposer(model, unit=False), classifier_task(model)
    features = collect(decomposer, batches_of(pixels), len(pixels))
    rows = Evaluation(labels, task.classes, bright, ("bright", "dark"), "shade")
    choosing = halves_of(rows)
    concept = concept_from_images(features.output, bright, labels, name="shade", poles=("bright", "dark"))
    everywhere = HeadEdits.learn_everywhere(
        decomposer, batches_of(pixels[choosing])(), group_cells(bright[choosing], labels[choosing])
    )
    passes = RowPasses(decomposer, lambda some: batches_of(pixels[some])(), task, everywhere)
    return GapQuestion(features, rows, task, concept, choosing=choosing, passes=passes)


def test_the_planted_head_is_turned_down_and_the_others_stay() -> None:
    """It says the brightness, of which the label knows nothing: without a group being named, it has to go."""
    question = asked()
    found = learn_gains(question, count=2)
    assert found.heads[0] == PLANTED
    assert found.values[PLANTED] < 0.5
    assert (found.values == 1).sum() >= LAYERS * HEADS - 2
    assert found.after < found.before
    gained = question.with_gains(found.values)
    before, after = gained.forward(gained.reported, "gain")([(), found.heads])
    gaps = gained.rows.take(gained.reported).figures([before, after])["evidence_gap"]
    assert abs(gaps[1]) < 0.5 * abs(gaps[0])


def test_gains_of_given_heads_leave_the_others() -> None:
    found = learn_gains(asked(), heads=[(0, 1), PLANTED])
    assert set(found.heads) <= {(0, 1), PLANTED}
    assert found.values[PLANTED] < 0.5


def told_plan(**how: Any) -> LocatePlan:
    return LocatePlan(count=2, target=0.5, target_metric="EOd", n_boot=200, **how)


def test_gains_that_are_told_the_groups_turn_the_planted_head_down() -> None:
    question = asked()
    found = learn_group_aware_gains(question, told_plan())
    assert found.reached
    assert PLANTED in found.heads
    assert found.values[PLANTED] < 0.5
    assert (found.values == 1).sum() >= LAYERS * HEADS - 2
    assert found.gap <= found.upper <= 0.5 * found.before
    assert "with the groups of the selection half" in found.sentence
    gained = question.with_gains(found.values)
    before, after = gained.forward(gained.reported, "gain")([(), found.heads])
    gaps = gained.rows.take(gained.reported).figures([before, after])["EOd"]
    assert gaps[1] < 0.5 * gaps[0]


def test_group_aware_gains_know_nothing_of_the_reporting_half() -> None:
    question, other = asked(), asked()
    labels, groups = (x.copy() for x in (other.rows.labels, other.rows.groups))
    labels[other.reported], groups[other.reported] = 1 - labels[other.reported], groups[other.reported][::-1]
    other.rows = replace(other.rows, labels=labels, groups=groups)
    first, second = (learn_group_aware_gains(one, told_plan()) for one in (question, other))
    assert np.array_equal(first.values, second.values)
    assert first.sentence == second.sentence


def drawn(rng: np.random.Generator, metric: str, n: int = 2000) -> tuple[Evaluation, list[Any]]:
    """Rows of persons (two a person on average), and logits with ever less of the group in them."""
    person = rng.integers(n // 2, size=n)
    group = (rng.random(n // 2) < 0.5).astype(int)[person]
    label = (rng.random(n) < 0.5 + (0.3 if metric == "EOd" else 0.0) * (group - 0.5)).astype(int)
    plain = 1.6 * (2 * label - 1) + 0.7 * rng.normal(size=n // 2)[person] + rng.normal(size=n)
    reads = [plain + share * (0.7 * group - 0.35) for share in (1, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0)]
    rows = Evaluation(label, ("no", "yes"), group, ("a", "b"), "group", clusters=person)
    return rows, [np.column_stack([-read, read]) for read in reads]


@pytest.mark.parametrize("metric", ["EOd", "cramers_v"])
def test_four_of_five_new_samples_stay_below_the_predicted_end(metric) -> None:
    """One edit, 500 pairs of samples: not that many do without the rule, nor with the error of this sample alone."""
    rng, plan = np.random.default_rng(0), LocatePlan(target=0.5, target_metric=metric, n_boot=200)
    below: dict[str, list[bool]] = {"predicted": [], "seen": [], "without the new sample's error": []}
    for _ in range(500):
        (rows, reads), (new, again) = drawn(rng, metric, 1000), drawn(rng, metric, 1000)
        here, there = (each.figures([x[0], x[3]])[metric] for each, x in ((rows, reads), (new, again)))
        over, over_there = here[1] - 0.5 * here[0], there[1] - 0.5 * there[0]
        ends = [rows.predicted(reads[0], reads[3], plan, n) - 0.5 * here[0] for n in (len(new), 10**12)]
        for name, end in zip(below, (ends[0], over, ends[1]), strict=True):
            below[name].append(bool(over_there <= end))
    p = {name: binomtest(sum(x), len(x), SURE).pvalue for name, x in below.items()}
    assert p.pop("predicted") > 0.01
    assert max(p.values()) < 0.001


def test_steps_and_doses_are_taken_by_what_is_predicted_and_not_by_the_gap_seen(monkeypatch) -> None:
    """Where they were learned both close the gap; if nothing is sure of new rows, neither reaches the target."""
    question, plan = asked(), told_plan()
    only: dict[str, Any] = {"kinds": ("mean",), "strengths": (1.0,), "counts": (1,)}
    assert learn_group_aware_gains(question, plan).reached
    assert find_dose(question, [Head(*PLANTED)], plan, **only).chosen is not None
    monkeypatch.setattr(Evaluation, "predicted", lambda *_: float("inf"))
    unsure = learn_group_aware_gains(question, plan)
    assert not unsure.reached
    assert find_dose(question, [Head(*PLANTED)], plan, **only).chosen is None


def test_a_larger_new_sample_is_predicted_more_closely() -> None:
    rows, reads = drawn(np.random.default_rng(1), "EOd")
    plan = LocatePlan(target=0.5, target_metric="EOd", n_boot=500)
    ends = [rows.predicted(reads[0], reads[4], plan, n) for n in (500, 2000, 10**12)]
    assert ends[0] > ends[1] > ends[2] > rows.figures([reads[4]])["EOd"][0]
    far, seen = (np.square(end - rows.figures([reads[4]])["EOd"][0]) for end in (ends[0], ends[2]))
    assert far / seen == pytest.approx(5)  # four times as many rows here: 1 + 4 variances instead of one


def test_the_corrected_v_of_a_table_is_bergsmas() -> None:
    """In closed form: phi² less its mean by chance, by the corrected numbers of rows and columns."""
    rows, reads = drawn(np.random.default_rng(2), "EOd")
    table = rows.counts(reads[3]).sum(1)
    n = table.sum()
    v = association(table.astype(int), method="cramer")  # of 2 × 2: phi
    wanted = np.sqrt(max(0.0, v**2 - 1 / (n - 1)) / (1 - 1 / (n - 1)))
    assert rows.figures([reads[3]])["cramers_v"][0] == pytest.approx(v)
    assert rows.figures([reads[3]])["cramers_v_corrected"][0] == pytest.approx(wanted)


def test_group_aware_gains_of_given_heads_say_where_the_target_is_out_of_reach() -> None:
    found = learn_group_aware_gains(asked(), told_plan(), heads=[(0, 1), (1, 0)])
    assert set(found.heads) <= {(0, 1), (1, 0)}
    assert not found.reached
    assert "no step is surely within the target" in found.sentence


@pytest.mark.parametrize(("metric", "given"), [("EOd", True), ("DP", False)])
def test_the_slope_of_the_told_objective_is_that_of_its_value(metric, given) -> None:
    """One head alone: its best gain is where the objective, written out plainly, is smallest."""
    rng, n = np.random.default_rng(0), 400
    labels, groups = np.arange(n) % 2, (np.arange(n) // 2) % 2
    rows = Evaluation(labels, ("no", "yes"), groups, ("a", "b"), "group")
    part = 0.8 * groups + 0.7 * labels + rng.normal(size=n)
    start = np.column_stack([np.zeros(n), part - 1 + rng.normal(size=n)])
    parts = np.column_stack([np.zeros(n), part]).reshape(-1, 1)
    told = _Objective(start, parts, np.ones(1), np.eye(2)[labels], _contrast(rows, metric))
    found = told.descend(np.ones(1), [0], 3.0)[0]

    def plainly(gain):
        p = expit(start[:, 1] + (gain - 1) * part)
        loss = -np.log(np.where(labels == 1, p, 1 - p)).mean()
        cells = [labels == y for y in (0, 1)] if given else [np.ones(n, dtype=bool)]
        gaps = [p[cell & (groups == 1)].mean() - p[cell & (groups == 0)].mean() for cell in cells]
        return loss + 3.0 * np.mean(np.square(gaps)) + 1e-3 / 2 * (gain - 1) ** 2

    grid = np.linspace(0.5, 1.5, 2001)
    assert found == pytest.approx(grid[np.argmin([plainly(gain) for gain in grid])], abs=2e-3)
    assert 0.55 < found < 1


def test_group_aware_gains_are_one_more_dose() -> None:
    question, plan = asked(), told_plan(draws=3)
    found = find_dose(question, [Head(*PLANTED)], plan, kinds=("mean",), strengths=(0.5,), counts=(1,), gains=True)
    of_gains = next(dose for dose in found.front if dose.kind == "gain")
    learned = learn_group_aware_gains(question, plan)
    assert (of_gains.heads, of_gains.gap, of_gains.accuracy) == (learned.heads, learned.gap, learned.accuracy)
    assert of_gains.gains == tuple(learned.values[head] for head in learned.heads)
    assert of_gains.upper == learned.upper
    stored = next(dose for dose in found.to_dict()["front"] if dose["kind"] == "gain")
    assert stored["gains"] == list(of_gains.gains)
    gained = question.with_gains(learned.values)
    after = gained.forward(gained.reported, "gain")([learned.heads])
    change = of_gains.change("EOd")
    assert change is not None
    assert change.b == pytest.approx(gained.rows.take(gained.reported).figures(after)["EOd"][0])
    assert [dose.kind for dose in find_dose(question, [Head(*PLANTED)], plan, kinds=("mean",)).tried].count("gain") == 0


def test_too_few_rows_for_group_aware_gains_leave_the_other_doses(caplog) -> None:
    """Three persons of one group: some quarter of the selection half has none of them, and cells are small."""
    question = asked()
    rare = question.rows.groups == 1
    persons = np.where(rare, np.arange(len(rare)) % 3, 3 + np.arange(len(rare)) % 40)
    question.rows = replace(question.rows, clusters=persons)
    assert learn_group_aware_gains(
        question, told_plan()
    ).heads  # folds of persons without one group are no reason to stop
    few = np.flatnonzero(question.choosing & rare)[12:]
    question.rows = replace(question.rows, groups=np.where(np.isin(np.arange(len(rare)), few), 0, rare))
    with pytest.raises(InputError, match="gains need 10 images of two groups"):
        learn_group_aware_gains(question, told_plan())
    assert group_aware_gains(question, told_plan()) is None
    assert "were not tried: gains need 10" in caplog.text
