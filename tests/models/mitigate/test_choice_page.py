"""What the page of a run says about the candidates and the clusters."""

import pytest

from fairhead.mitigate.choosing import choice_section, choice_verdict


def notes(rates):
    return {"kept": "plain", "clusters": {"rows": [60, 40], "label_rates": rates, "stability": {}}}


@pytest.mark.parametrize(
    ("rates", "warned"),
    [
        ([[0.98, 0.02], [0.01, 0.99]], True),  # each class has its cluster
        ([[0.7, 0.3], [0.2, 0.8]], False),
        ([[0.96, 0.04], [0.95, 0.05]], False),  # pure, but only because one class is rare
    ],
)
def test_clusters_that_are_the_classes_are_said_to_be_of_no_use(rates, warned):
    said = " ".join(sentence.text for sentence in choice_verdict(notes(rates)))
    assert ("nearly the classes" in said) == warned


def test_a_cluster_of_one_class_is_named():
    """By its rows: a rate that is rounded to 1 may hide a row of another class. A second warning stays."""
    found = notes([[0.5, 0.5], [0.0, 1.0]])
    assert not choice_verdict(found)
    found["clusters"] |= {"count": 2, "of_one_class": [False, True], "stability": {"2": 0.2}}
    first, second = (sentence.text for sentence in choice_verdict(found))
    assert first == "Cluster 2 has one class alone: weights cannot make it independent of the label."
    assert second.startswith("The clusters are not very stable")


CLUSTERS = {"count": 2, "rows": [60, 40], "label_rates": [[0.7, 0.3], [0.2, 0.8]], "in_groups": 0.0}


@pytest.mark.parametrize(
    ("stability", "in_groups", "said"),
    [
        (0.03, 0.0, "hardly more stable than chance"),
        (0.8, 0.0, "not separate groups (0 % of the rows lie in separate groups; 50 % are required"),
        (0.8, None, "cannot be told (no class has 20 rows on both sides of two clusters)"),
    ],
)
def test_what_speaks_against_clusters_is_said(stability, in_groups, said):
    clusters = {**CLUSTERS, "stability": {"2": stability}, "in_groups": in_groups}
    left = {"kept": "plain", "asked": ["plain", "balance"], "clusters": clusters, "not balanced": ["balance"]}
    first, second = (sentence.text for sentence in choice_verdict(left))
    assert first == "Selected: plain training, as no other candidate was left. No groups were used."
    assert said in second
    assert second.endswith("balance left out.")


def test_a_spread_that_is_not_known_is_not_nought():
    one = {"accuracy": 0.9, "spread": None, "cost": 0.0, "cost_se": 0.0, "affordable": True, "gain": None}
    tried = [{**one, "name": name, "gain_se": None} for name in ("plain", "balance")]
    clusters = {**CLUSTERS, "stability": {"2": 0.3}}
    found = {"kept": "plain", "tried": tried, "price": 2, "clusters": clusters}
    (section,) = choice_section(found, ("no", "yes"))
    assert all(f"{word}: " in section.tables[0].caption for word in ("Spread", "Cost", "Gain"))
    assert section.tables[0].rows[1] == ("balance", "90.0", "undefined", "0.0 ± 0.0", "undefined", "")
    assert "other rows would give other clusters" in " ".join(sentence.text for sentence in choice_verdict(found))
