"""What the page of a run says about the candidates and the clusters."""

import pytest

from fairhead.bench.one_run import choice_verdict


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
