"""Balance, match, their choice, and the linear head: against scikit-learn, SciPy and data whose answer is known."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from made_vit import vit
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import adjusted_rand_score

from fairhead.errors import InputError, UnsupportedModel
from fairhead.mitigate import auto_balance_match, load, method, run, save
from fairhead.mitigate.auto_balance_match import Reduce
from fairhead.mitigate.choosing import choice_verdict, choose, judge, share_of_groups, variance_between
from fairhead.mitigate.references import run_with_attributes
from fairhead.mitigate.row_weights import match_weights
from fairhead.models import method_of
from fairhead.models.attached import FEATURES, LinearHead
from fairhead.train import TrainingPlan
from fairhead.train.fitting import answers, solve
from fairhead.train.kmeans import (
    Stability,
    adjusted_rand,
    find_clusters,
    independent_weights,
    kmeans,
    most_stable,
    stabilities,
)
from fairhead.train.step import Examples

WIDTH = 12


def hidden_group(n, agreement, seed, shift=4.0):
    """Features whose first columns show the label, and others, more strongly, a group that agrees with it so often."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 2, n)
    group = np.where(rng.random(n) < agreement, label, 1 - label)
    features = rng.normal(size=(n, WIDTH))
    features[:, 0] += 2.0 * (label - 0.5)
    features[:, 1:6] += shift * (group - 0.5)[:, None]
    return Examples({FEATURES: torch.tensor(features).float()}, torch.tensor(label)), torch.tensor(group)


def heads(train):
    return lambda: LinearHead.of(train.inputs[FEATURES], ("no", "yes"))


def gap(model, examples, group):
    """The difference between groups of how often a class is answered, given the label: the mean of both labels."""
    said = answers(model, examples.inputs[FEATURES])
    rates = [[(said[(examples.labels == y) & (group == g)] == 1).float().mean() for g in (0, 1)] for y in (0, 1)]
    return float(np.mean([abs(one - other) for one, other in rates]))


# The linear head


@pytest.mark.parametrize("classes", [2, 3])
def test_the_head_is_scikit_learns_weighted_regression(classes):
    rng = np.random.default_rng(0)
    features, labels = rng.normal(3, 5, (300, 6)), rng.integers(0, classes, 300)
    features[:, 0] += 4 * labels
    weights = rng.uniform(0.2, 3, 300)
    head = LinearHead.of(torch.tensor(features).float(), [str(c) for c in range(classes)])
    solve(head, torch.tensor(features).float(), torch.tensor(labels), torch.tensor(weights), penalty=0.05)
    standard = head.standardised(torch.tensor(features).float()).double().numpy()
    # scikit-learn has one weight vector for two classes, whose norm² is half of that of the difference of two.
    strength = (2 if classes == 2 else 1) / (0.05 * weights.sum())
    peer = LogisticRegression(C=strength, tol=1e-8, max_iter=2000).fit(standard, labels, weights)
    ours = head(torch.tensor(features).float()).logits.softmax(-1).detach().numpy()
    np.testing.assert_allclose(ours, peer.predict_proba(standard), atol=2e-3)


@pytest.mark.parametrize("unit", [1e-9, 1e9])
def test_the_unit_of_the_features_plays_no_part(unit):
    train, _ = hidden_group(400, 0.9, seed=0)
    given = train.inputs[FEATURES]
    answered = []
    for features in (given, torch.cat([unit * given, torch.full((400, 1), 0.1)], 1)):
        head = LinearHead.of(features, ("no", "yes"))
        solve(head, features, train.labels, penalty=0.05)
        answered.append(head(features).logits.softmax(-1))
    torch.testing.assert_close(*answered, atol=1e-3, rtol=0)


def test_offsets_are_given_and_not_learnt():
    """With log-odds of the group as offsets, the head has no use for a feature that shows the group alone."""
    train, group = hidden_group(4000, 0.9, seed=0)
    from fairhead.mitigate.row_weights import label_offsets

    plain, adjusted = heads(train)(), heads(train)()
    solve(plain, train.inputs[FEATURES], train.labels, penalty=1e-3)
    solve(adjusted, train.inputs[FEATURES], train.labels, offsets=label_offsets(train.labels, group), penalty=1e-3)
    shown = [head.last.weight.diff(dim=0)[0, 1:6].abs().max().item() for head in (plain, adjusted)]
    assert shown[1] < shown[0] / 4


@pytest.mark.parametrize("name", ["jtt", "eiil", "spare"])
def test_a_stage_of_a_number_of_epochs_takes_them_on_a_head_too(name):
    train, _ = hidden_group(640, 0.9, seed=0)
    stage = run(method(name), heads(train), train, train, TrainingPlan(epochs=2, device="cpu")).stages[0]
    assert stage.steps == 10  # one epoch of batches of 64


@pytest.mark.parametrize("name", ["dam", "encoder_layer"])
def test_a_head_has_no_attention_to_change(name):
    train, _ = hidden_group(64, 0.9, seed=0)
    with pytest.raises(UnsupportedModel, match=r"a linear head has no attention.*--train last_encoder"):
        run(method(name), heads(train), train, train, TrainingPlan(device="cpu"))


def test_a_head_has_no_queries_to_align():
    train, groups = hidden_group(64, 0.9, seed=0)
    with pytest.raises(UnsupportedModel, match=r"a linear head has no attention.*--train last_encoder"):
        run_with_attributes(
            method("tadet"), heads(train), train, train, groups, groups, plan=TrainingPlan(device="cpu")
        )


def test_afr_begins_with_plain_training_as_it_is_elsewhere():
    train, _ = hidden_group(640, 0.9, seed=0)
    plan = TrainingPlan(epochs=2, device="cpu", weight_decay=0.05)
    model = run(method("afr", gamma=0.0, steps=1, learning_rate=1e-9), heads(train), train, train, plan).model
    order = torch.randperm(640, generator=torch.Generator().manual_seed(0))
    plain = heads(train)()
    first = train.take(order[128:])
    solve(plain, first.inputs[FEATURES], first.labels, penalty=0.05)
    torch.testing.assert_close(model.last.weight, plain.last.weight, atol=1e-6, rtol=0)


def test_a_head_is_saved_loaded_and_folded_into_one_layer(tmp_path):
    train, _ = hidden_group(200, 0.5, seed=1)
    features = torch.cat([train.inputs[FEATURES], torch.ones(200, 1)], 1)  # a constant column
    head = LinearHead.of(features, ("no", "yes"))
    solve(head, features, train.labels)
    save(head, tmp_path / "head")
    again = load(tmp_path / "head")
    assert again.config.id2label == {0: "no", 1: "yes"}
    torch.testing.assert_close(again(features).logits, head(features).logits)
    weight, bias = head.layer()
    torch.testing.assert_close(features @ weight.T + bias, head(features).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda x: x.index_put_((torch.tensor([3, 4]), torch.tensor([2, 2])), torch.tensor(torch.nan)),
            "column 2 .* 2 of",
        ),
        (lambda x: x.fill_(7.0), "the same in every row"),
    ],
)
def test_features_that_cannot_be_used_are_refused(spoil, said):
    features = torch.randn(50, 4)
    spoil(features)
    with pytest.raises(InputError, match=said):
        LinearHead.of(features, ("no", "yes"))


# Clusters


def test_agreement_of_clusterings_is_scikit_learns():
    rng = np.random.default_rng(0)
    for k in (2, 3, 9):
        one, other = rng.integers(0, k, 200), rng.integers(0, 3, 200)
        ours = adjusted_rand(torch.tensor(one), torch.tensor(other))
        assert ours == pytest.approx(adjusted_rand_score(one, other), abs=1e-12)


def test_the_number_of_groups_is_the_stable_one():
    rng = np.random.default_rng(0)
    centres = 6 * rng.normal(size=(4, WIDTH))
    truth = rng.integers(0, 4, 1200)
    points = torch.tensor(centres[truth] + rng.normal(size=(1200, WIDTH))).float()
    found = stabilities(points, (2, 3, 4, 8))
    assert most_stable(found) == 4
    assert adjusted_rand_score(kmeans(points, 4).cluster, truth) > 0.99
    assert adjusted_rand_score(KMeans(4, n_init=4, random_state=0).fit_predict(points), truth) > 0.99
    assert most_stable([Stability(2, (0.5,)), Stability(3, (0.5,))]) == 2  # the smaller of equals


def test_hidden_groups_are_found_and_new_rows_are_put_among_them():
    train, group = hidden_group(2000, 0.8, seed=0)
    test, test_group = hidden_group(500, 0.5, seed=1)
    found = find_clusters(train.inputs[FEATURES])
    assert found.size == 2
    assert adjusted_rand(found.clustering.cluster, group) > 0.9
    assert adjusted_rand(found.of(test.inputs[FEATURES]), test_group) > 0.9


@pytest.mark.parametrize("turned", [False, True])
def test_a_group_is_found_whatever_the_axes_are(turned):
    rng = np.random.default_rng(0)
    group, features = rng.integers(0, 2, 1500), rng.normal(size=(1500, 32))
    features[:, 0] += 8 * (group - 0.5)
    if turned:
        features = features @ np.linalg.qr(rng.normal(size=(32, 32)))[0]
    found = find_clusters(torch.tensor(features).float())
    assert found.size == 2
    assert adjusted_rand(found.clustering.cluster, torch.tensor(group)) > 0.99


def test_fewer_rows_than_clusters_are_told():
    with pytest.raises(InputError, match="8 clusters of 5 rows"):
        find_clusters(torch.randn(5, 3), 8)
    with pytest.raises(InputError, match="4 rows are too few for clusters"):
        find_clusters(torch.randn(4, 3))


# Match


def test_weights_towards_another_sample_are_its_density_ratio():
    """Within a class the group is 0.9 here and 0.4 there: the weighted shares must come close to those there."""
    train, group = hidden_group(6000, 0.9, seed=0)
    use, _ = hidden_group(3000, 0.4, seed=1)
    found = match_weights(train.inputs[FEATURES], train.labels, use.inputs[FEATURES], use.labels)
    assert found.differ
    assert found.p < 1e-6
    assert found.separation > 0.6
    for y in (0, 1):
        rows = train.labels == y
        share = (found.weights[rows] * (group[rows] == y)).sum() / found.weights[rows].sum()
        assert share == pytest.approx(0.4, abs=0.06)
        assert found.weights[rows].mean() == pytest.approx(1, abs=1e-6)
    assert found.effective == pytest.approx((found.weights.sum() ** 2 / (found.weights**2).sum() / 6000).item())


@pytest.mark.slow
def test_alike_samples_are_said_to_differ_as_often_as_alpha_allows():
    ps = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        rows, labels = torch.tensor(rng.normal(size=(240, 3))).float(), torch.arange(240) % 2
        ps.append(match_weights(rows[:160], labels[:160], rows[160:], labels[160:]).p)
    assert np.mean(np.array(ps) < 0.05) <= 0.085  # at 5 %, more than 17 of 200 come in 1.6 % of cases; 12 % fail here
    assert np.mean(np.array(ps) < 0.5) == pytest.approx(0.5, abs=0.15)


def test_persons_that_are_recognised_are_no_difference():
    """Ten rows a person, persons of two samples drawn alike: rows alone would be told apart by their faces."""
    rng = np.random.default_rng(0)
    persons = rng.normal(size=(90, 60)) * 3
    unit = np.repeat(np.arange(90), 10)
    rows = torch.tensor(persons[unit] + 0.1 * rng.normal(size=(900, 60))).float()
    unit, labels = torch.tensor(unit), torch.zeros(900, dtype=torch.int64)
    labels[::2] = 1
    here, there = unit < 60, unit >= 60
    alone = match_weights(rows[here], labels[here], rows[there], labels[there])
    together = match_weights(rows[here], labels[here], rows[there], labels[there], unit[here], unit[there])
    assert alone.p < 1e-3
    assert together.p > 0.01


def test_a_sample_without_a_class_is_told():
    train, _ = hidden_group(300, 0.5, seed=0)
    use = Examples({FEATURES: torch.randn(50, WIDTH)}, torch.ones(50, dtype=torch.int64))
    with pytest.raises(InputError, match="has 0 rows of class 0"):
        match_weights(train.inputs[FEATURES], train.labels, use.inputs[FEATURES], use.labels)
    with pytest.raises(InputError, match="has 0 rows of class no: give"):  # by its name, where that is known
        run(method("match"), heads(train), train, train, TrainingPlan(device="cpu"), like=use)


# The choice


def between_clusters(answers, labels, clusters):
    tables = np.zeros((2, labels.max() + 1, clusters.max() + 1))  # the right answers, and all rows
    np.add.at(tables[0], (labels, clusters), answers == labels)
    np.add.at(tables[1], (labels, clusters), 1)
    return float(variance_between(*tables))


def test_noise_alone_is_no_spread():
    rng = np.random.default_rng(0)
    found = []
    for _ in range(300):
        labels, clusters = rng.integers(0, 2, 400), rng.integers(0, 8, 400)
        found.append(between_clusters((rng.random(400) < 0.2 + 0.6 * labels).astype(np.int64), labels, clusters))
    assert np.mean(found) == pytest.approx(0, abs=4 * np.std(found) / np.sqrt(300))
    assert np.std(found) > 0


def test_the_spread_of_two_clusters_is_half_of_the_gap():
    labels = np.repeat([0, 1], 100_000)
    clusters = np.tile(np.repeat([0, 1], 50_000), 2)
    rates = np.array([[0.1, 0.3], [0.6, 0.9]])[labels, clusters]
    said = (np.random.default_rng(0).random(200_000) < rates).astype(np.int64)
    assert between_clusters(said, labels, clusters) == pytest.approx((0.1**2 + 0.15**2) / 2, abs=1e-3)


@pytest.mark.parametrize("classes", [2, 5, 30])
def test_the_spread_is_that_of_accuracy_whatever_the_number_of_classes(classes):
    rng = np.random.default_rng(0)
    labels, clusters = rng.integers(0, classes, 60_000), rng.integers(0, 2, 60_000)
    wrong = (labels + rng.integers(1, classes, 60_000)) % classes
    answers = np.where(rng.random(60_000) < np.array([0.95, 0.45])[clusters], labels, wrong)
    assert between_clusters(answers, labels, clusters) ** 0.5 == pytest.approx(0.25, abs=0.01)


def test_a_spread_that_nothing_shows_is_undefined_and_chooses_nothing():
    labels, clusters = np.repeat([0, 1], 50), np.repeat([0, 1], 50)  # each class has its own cluster
    plain = np.where(np.arange(100) % 5 == 0, 1 - labels, labels)
    assert np.isnan(between_clusters(plain, labels, clusters))
    results = judge({"plain": plain, "balance": labels, "match": labels}, labels, clusters, None, 0.02)
    assert [one.spread for one in results] == [None] * 3
    assert results[1].gain is None
    assert choose(results[:2]).name == "plain"
    assert results[2].gain == pytest.approx(0.2)  # match needs no clusters: its accuracy counts
    assert choose(results).name == "match"


def test_the_standard_error_of_a_gain_is_how_much_it_varies_over_samples():
    def sample(rng):
        labels, clusters = rng.integers(0, 2, 1500), rng.integers(0, 2, 1500)
        luck = rng.random(1500)
        plain = np.where(luck < 0.1 + 0.2 * clusters, 1 - labels, labels)
        other = np.where(luck < 0.18 + 0.06 * clusters, 1 - labels, labels)
        return judge({"plain": plain, "other": other}, labels, clusters, None, 0.02)[1]

    results = [sample(np.random.default_rng(seed)) for seed in range(60)]
    varies = np.std([one.gain for one in results], ddof=1)
    assert np.mean([one.gain_se for one in results]) == pytest.approx(varies, rel=0.25)  # 60 samples tell it to 9 %


def test_a_gain_within_its_noise_does_not_replace_plain_training():
    """Two models that are equally good, and a class of 60 rows: one has the smaller sum, as a rule by chance alone."""
    smaller, kept = [], []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        labels, clusters = (np.arange(1000) < 60).astype(np.int64), rng.integers(0, 2, 1000)
        said = {name: np.where((rng.random(1000) < 0.3) & (labels == 1), 0, labels) for name in ("plain", "other")}
        results = judge(said, labels, clusters, None, 0.02)
        smaller.append(results[1].total < results[0].total)
        kept.append(choose(results).name == "other")
    assert np.mean(smaller) == pytest.approx(0.5, abs=0.15)
    assert np.mean(kept) < 0.27  # of normal noise 16 % exceed one standard error


def label_alone(n, seed):
    """Each class is one cloud, and there is no group."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 2, n)
    features = rng.normal(size=(n, 32)) + 0.38 * (label - 0.5)[:, None]
    return Examples({FEATURES: torch.tensor(features).float()}, torch.tensor(label))


def test_plain_training_is_kept_where_there_is_no_group():
    """The clusters then part the classes, and within one of them easy rows from hard rows."""
    train, validation = label_alone(2000, 0), label_alone(400, 1)
    plan = TrainingPlan(weight_decay=0.01, device="cpu")
    notes = run(Reduce(("plain", "balance"), price=20), heads(train), train, validation, plan).notes
    assert notes["clusters"]["stability"]["2"] > 0.5
    assert notes["clusters"]["in_groups"] == 0
    assert (notes["kept"], notes["not balanced"]) == ("plain", ["balance"])


def in_groups(examples, k=None):
    found = find_clusters(examples.inputs[FEATURES], k)
    points = torch.nn.functional.normalize(examples.inputs[FEATURES]) - found.mean
    return share_of_groups(points @ found.axes, found.clustering.centres, examples.labels)


def test_noise_has_no_groups_however_many_clusters_cut_it():
    train = label_alone(3000, 0)
    assert [in_groups(train, k) for k in (2, 3, 6)] == [0, 0, 0]
    assert in_groups(train.take(torch.arange(30)), 2) is None


@pytest.mark.parametrize("agreement", [0.6, 0.9, 0.98])
def test_groups_are_known_however_few_rows_of_a_class_are_of_the_other(agreement):
    train, _ = hidden_group(4000, agreement, seed=0)
    assert in_groups(train) == 1


def test_rows_between_classes_are_no_groups():
    """Five ages in one direction, and clusters that are the young and the old."""
    rng = np.random.default_rng(0)
    age = rng.integers(0, 5, 4000)
    features = rng.normal(size=(4000, 16))
    features[:, :4] += 0.9 * (age - 2)[:, None]
    train = Examples({FEATURES: torch.tensor(features).float()}, torch.tensor(age))
    assert in_groups(train, 2) < 0.1


def test_clusters_of_nothing_are_not_balanced_on():
    rng = np.random.default_rng(0)
    parts = [
        Examples({FEATURES: torch.tensor(rng.normal(size=(n, 40))).float()}, torch.tensor(rng.integers(0, 2, n)))
        for n in (1000, 300)
    ]
    notes = run(Reduce(("plain", "balance")), heads(parts[0]), *parts, TrainingPlan(device="cpu")).notes
    assert max(notes["clusters"]["stability"].values()) < 0.1
    assert (notes["kept"], notes["not balanced"]) == ("plain", ["balance"])


def test_rows_that_all_have_the_same_features_are_not_balanced_on():
    """Of unit length, one positive column is the same number in every row."""
    rng = np.random.default_rng(0)
    labels = torch.tensor(rng.integers(0, 2, 200))
    train = Examples({FEATURES: torch.tensor(rng.uniform(1, 9, (200, 1))).float()}, labels)
    notes = run(Reduce(("plain", "balance")), heads(train), train, train, TrainingPlan(device="cpu")).notes
    assert (notes["clusters"]["count"], notes["kept"], notes["not balanced"]) == (1, "plain", ["balance"])
    (said,) = choice_verdict(notes)[1:]
    assert said.text.startswith("All rows have the same features")


def test_what_costs_too_much_is_not_chosen():
    rng = np.random.default_rng(0)
    labels, clusters = rng.integers(0, 2, 2000), rng.integers(0, 2, 2000)
    plain = np.where(rng.random(2000) < 0.05 + 0.25 * clusters, 1 - labels, labels)  # right less often in cluster 1
    even = np.where(rng.random(2000) < 0.25, 1 - labels, labels)
    said = {"plain": plain, "even": even}
    cheap, dear = (judge(said, labels, clusters, None, price) for price in (0.02, 0.2))
    assert [one.affordable for one in cheap] == [True, False]
    assert (choose(cheap).name, choose(dear).name) == ("plain", "even")
    assert dear[1].cost == pytest.approx((plain == labels).mean() - (even == labels).mean())
    lost = (plain == labels).astype(float) - (even == labels)
    assert dear[1].cost_se == pytest.approx(lost.std() / np.sqrt(2000), rel=0.15)


# All of it


@pytest.mark.parametrize(
    "candidates", [("plain", "balance"), ("plain", "logits"), ("plain", "balance", "match", "both")]
)
def test_a_gap_between_groups_that_nobody_named_is_reduced(candidates):
    train, _ = hidden_group(3000, 0.85, seed=0, shift=3)
    validation, _ = hidden_group(1000, 0.85, seed=1, shift=3)
    test, group = hidden_group(4000, 0.5, seed=2, shift=3)
    plan = TrainingPlan(weight_decay=0.01, device="cpu")
    plain = run(method("erm"), heads(train), train, validation, plan).model
    found = run(Reduce(candidates, price=20), heads(train), train, validation, plan)
    assert found.notes["kept"] != "plain"
    assert not found.notes["match"]["differ"]
    assert gap(plain, test, group) > 0.15
    assert gap(found.model, test, group) < gap(plain, test, group) / 3


def test_what_is_too_dear_is_tried_with_less_strength():
    train, _ = hidden_group(3000, 0.85, seed=0, shift=3)
    validation, _ = hidden_group(1000, 0.85, seed=1, shift=3)
    test, group = hidden_group(4000, 0.5, seed=2, shift=3)
    plan = TrainingPlan(weight_decay=0.01, device="cpu")
    full, half, none = (
        run(Reduce(("plain", "balance"), price=price), heads(train), train, validation, plan) for price in (20, 2, 0)
    )
    assert [one.notes["kept"] for one in (full, half, none)] == ["balance", "balance 0.5", "plain"]
    assert [len(one.notes["tried"]) for one in (full, half, none)] == [2, 4, 5]
    gaps = [gap(one.model, test, group) for one in (full, half, none)]
    assert gaps == sorted(gaps)
    # By hand: the square roots of the balancing weights.
    features = train.inputs[FEATURES]
    weights = independent_weights(train.labels, find_clusters(features).clustering.cluster).sqrt()
    by_hand = heads(train)()
    solve(by_hand, features, train.labels, weights / weights.mean(), None, plan.weight_decay)
    torch.testing.assert_close(half.model.last.weight, by_hand.last.weight, rtol=1e-3, atol=1e-4)


def test_a_sample_from_the_place_of_use_is_matched():
    train, _ = hidden_group(3000, 0.9, seed=0, shift=2)
    validation, _ = hidden_group(1000, 0.5, seed=1, shift=2)
    test, group = hidden_group(4000, 0.5, seed=2, shift=2)
    plan = TrainingPlan(weight_decay=0.01, device="cpu")
    plain = run(method("erm"), heads(train), train, validation, plan).model
    found = run(method("match"), heads(train), train, validation, plan)
    assert found.notes["match"]["differ"]
    (said,) = choice_verdict(found.notes)[-1:]
    assert "those of the validation part differ significantly within" in said.text
    assert gap(found.model, test, group) < gap(plain, test, group) / 3
    # The same rows given as a sample, beside validation rows that are like the training rows.
    other, _ = hidden_group(1000, 0.9, seed=3, shift=2)
    again = run(method("match"), heads(train), train, other, plan, like=validation)
    assert "rows and those of the deployment sample differ significantly within" in choice_verdict(again.notes)[-1].text
    torch.testing.assert_close(again.model.last.weight, found.model.last.weight)


def many_columns(n, seed, moved=0.0):
    """Weights in many dimensions fit the sample itself: there they look good, elsewhere accuracy is lost."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n, 200))
    label = (features[:, :10].sum(1) + rng.normal(size=n) > 0).astype(int)
    features[:, -1] += moved  # says nothing about the label
    return Examples({FEATURES: torch.tensor(features).float()}, torch.tensor(label))


def test_weaker_matching_is_judged_on_rows_that_nothing_was_matched_to(monkeypatch):
    train, use = many_columns(900, 102), many_columns(200, 1102, moved=2.0)
    choose = auto_balance_match.choose

    def not_affordable(results, at_any_price=False):
        return replace(results[-1], affordable=False) if at_any_price else choose(results)

    monkeypatch.setattr(auto_balance_match, "choose", not_affordable)
    plan = TrainingPlan(weight_decay=0.1, device="cpu")
    notes = run(Reduce(("plain", "match"), price=50), heads(train), train, use, plan).notes
    weaker = notes["tried"][-1]
    assert weaker["name"] == "match 0.75"
    weights = match_weights(train.inputs[FEATURES], train.labels, use.inputs[FEATURES], use.labels).weights ** 0.75
    matched = heads(train)()
    solve(matched, train.inputs[FEATURES], train.labels, weights / weights.mean(), None, plan.weight_decay)
    on_its_own = (answers(matched, use.inputs[FEATURES]) == use.labels).float().mean()
    assert weaker["accuracy"] < on_its_own - 0.05


@pytest.mark.parametrize("name", ["auto", "match"])
def test_matching_is_judged_on_rows_that_nothing_was_matched_to(name):
    rows = many_columns
    train, use, test = rows(900, 102), rows(200, 1102, moved=2.0), rows(3000, 2102, moved=2.0)
    plan = TrainingPlan(weight_decay=0.1, device="cpu")
    weights = match_weights(train.inputs[FEATURES], train.labels, use.inputs[FEATURES], use.labels)
    assert weights.differ
    matched = heads(train)()
    solve(matched, train.inputs[FEATURES], train.labels, weights.weights, None, plan.weight_decay)
    plain = run(method("erm"), heads(train), train, use, plan).model

    def right(model, part):
        return (answers(model, part.inputs[FEATURES]) == part.labels).float().mean()

    assert right(matched, use) > right(plain, use) - 0.02, "it looks affordable on the rows that it was matched to"
    assert right(matched, test) < right(plain, test) - 0.1, "and is not"
    found = run(method(name), heads(train), train, use, plan)
    assert [one["name"] for one in found.notes["matching over the price"]] == ["match"]
    assert found.notes.get("not balanced") == (["balance", "both"] if name == "auto" else None)
    assert right(found.model, test) > right(plain, test) - 0.02


def test_the_label_is_taken_out_by_a_sample_in_which_it_is_not_confounded():
    """Where the label shows more than the group, raw clusters are the classes; without it they are the group."""
    train, group = hidden_group(3000, 0.9, seed=0, shift=1.5)
    use, _ = hidden_group(1500, 0.5, seed=1, shift=1.5)
    for part in (train, use):
        part.inputs[FEATURES][:, 6:] += 3 * (part.labels[:, None] - 0.5)
    plan = TrainingPlan(weight_decay=0.01, device="cpu")
    for without_label, told in ((False, train.labels), (True, group)):
        reduce = Reduce(("balance",), clusters=2, without_label=without_label)
        notes = run(reduce, heads(train), train, use, plan).notes
        rows = torch.tensor(notes["clusters"]["label_rates"])[:, 1]
        # Of the classes, a cluster has one; of the group, 90 % and 10 %.
        assert (rows.max() > 0.98) == (told is train.labels), rows
        assert (0.8 < rows.max() < 0.95) == (told is group), rows
    alike, _ = hidden_group(1500, 0.9, seed=2, shift=1.5)
    alike.inputs[FEATURES][:, 6:] += 3 * (alike.labels[:, None] - 0.5)
    notes = run(Reduce(("balance",), clusters=2, without_label=True), heads(train), train, alike, plan).notes
    assert notes["label taken out"] is False


def test_nothing_is_done_where_nothing_differs():
    train, _ = hidden_group(2000, 0.5, seed=0)
    validation, _ = hidden_group(800, 0.5, seed=1)
    plan = TrainingPlan(weight_decay=0.01, device="cpu")
    found = run(method("match"), heads(train), train, validation, plan)
    plain = run(method("erm"), heads(train), train, validation, plan)
    assert found.notes["kept"] == "plain"
    assert torch.equal(found.model.last.weight, plain.model.last.weight)


def test_an_average_of_epochs_is_the_mean_of_their_weights():
    from shortcut import PLAN, build_model, shortcut

    from fairhead.train.fitting import AVERAGE, fit

    task = shortcut(n=400)
    seen, model = [], build_model()

    def look(epoch):
        seen.append({name: tensor.detach().clone() for name, tensor in model.state_dict().items()})

    plan = PLAN if PLAN.epochs >= 6 else TrainingPlan(epochs=6, batch_size=PLAN.batch_size)
    fit(model, task.train, task.validation, plan, look, selection=AVERAGE)
    for name, tensor in model.state_dict().items():
        last = torch.stack([weights[name] for weights in seen[-(plan.epochs // 3) :]])
        torch.testing.assert_close(tensor, last.mean(0), rtol=1e-4, atol=1e-6)


def test_cross_fitted_answers_do_not_remember_held_out_rows():
    """Labels by chance, more features than rows, no penalty: a start at the solution would be right every time."""
    torch.manual_seed(0)
    train = Examples({FEATURES: torch.randn(300, 400)}, torch.arange(300) % 2)
    validation = Examples({FEATURES: torch.randn(200, 400)}, torch.arange(200) % 2)
    plan = TrainingPlan(weight_decay=0.0, device="cpu")
    found = run(Reduce(("plain", "balance"), clusters=2), heads(train), train, validation, plan)
    assert all(one["accuracy"] < 0.65 for one in found.notes["tried"])


def test_a_class_without_rows_leaves_the_others_as_they_are():
    train, _ = hidden_group(400, 0.7, seed=0)
    validation, _ = hidden_group(200, 0.7, seed=1)

    def three_classes():
        return LinearHead.of(train.inputs[FEATURES], ("no", "yes", "never"))

    found = run(Reduce(("plain", "balance", "logits")), three_classes, train, validation, TrainingPlan(device="cpu"))
    assert {one["name"] for one in found.notes["tried"]} == {"plain", "balance", "logits"}


@pytest.mark.parametrize("under", ["jtt", "group_dro", "auto"])
def test_methods_that_would_not_use_the_weights_are_refused(under):
    with pytest.raises(InputError, match="weights can be used under erm, dam"):
        Reduce(under=under)
    with pytest.raises(InputError, match="logits has its own loss"):
        Reduce(("plain", "logits"), under="dam")


@pytest.mark.parametrize("name", ["match", "both"])
def test_weights_towards_a_sample_are_used_under_dam(name):
    """Bright pictures are frequent in one class of the training part, and half of each class of the sample."""

    def rows(n, share, seed):
        chance = torch.Generator().manual_seed(seed)
        labels = torch.arange(n) % 2
        bright = torch.where(torch.rand(n, generator=chance) < share, labels, 1 - labels)
        pixels = torch.randn(n, 1, 4, 4, generator=chance) * 0.3 + bright[:, None, None, None]
        return Examples({"pixel_values": pixels}, labels)

    def build():
        return vit().requires_grad_(True)

    train, validation, sample = rows(240, 0.9, 0), rows(80, 0.9, 1), rows(160, 0.5, 2)
    plan = TrainingPlan(epochs=2, batch_size=40, device="cpu")
    how = {"encoder": lambda part: part.inputs["pixel_values"].flatten(1), "clusters": 2, "under": "dam"}
    found, alike = (
        run(Reduce((name,), **how), build, train, validation, plan, like=like) for like in (sample, rows(160, 0.9, 3))
    )
    assert (found.notes["kept"], alike.notes["kept"]) == (name, "plain")
    assert type(method_of(found.model)).__name__ == type(method_of(alike.model)).__name__ == "DAM"
    assert not all(map(torch.equal, found.model.state_dict().values(), alike.model.state_dict().values()))


def test_clusters_are_not_persons():
    """Sixteen persons of forty rows each, two kinds of them: halves of rows would call the persons stable."""
    rng = np.random.default_rng(0)
    persons = rng.normal(size=(16, WIDTH)) * 2
    persons[8:] += 10
    unit = torch.arange(16).repeat_interleave(40)
    rows = torch.tensor(persons[unit] + 0.2 * rng.normal(size=(640, WIDTH))).float()
    by_rows, by_units = ([one.mean for one in stabilities(rows, (2, 16), units=given)] for given in (None, unit))
    assert by_rows[0] > 0.99
    assert by_units[0] > 0.99
    assert by_rows[1] > by_units[1] + 0.1
