"""Five real group columns, which go along with each other, and predictions that depend on none of them."""

import io
import zipfile

import numpy as np
import pandas as pd
import pytest

import fairhead
from fairhead.audit.audit_results import audit_verdicts

COLUMNS = ["Male", "Young", "Eyeglasses", "Wearing_Hat", "Chubby"]


@pytest.fixture(scope="module")
def attributes(real_data) -> pd.DataFrame:
    with zipfile.ZipFile(real_data("images/celeba10k.zip")) as archive:
        text = archive.read("celeba/list_attr_celeba.txt").decode()
    return pd.read_csv(io.StringIO(text), sep=r"\s+", skiprows=1)


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "crossed"), [(5, False), (3, True)])
def test_chance_makes_a_headline_in_5_percent_at_most(attributes, columns, crossed):
    """High_Cheekbones stands for a prediction of Smiling. Both are moved to other rows together, so no gap is real."""
    rng, repeats, false = np.random.default_rng(columns), 1000, 0
    for _ in range(repeats):
        groups = attributes[COLUMNS[:columns]].sample(3000, random_state=rng).reset_index(drop=True)
        moved = attributes[["Smiling", "High_Cheekbones"]].sample(3000, random_state=rng).reset_index(drop=True)
        found = fairhead.audit(
            pd.concat([groups, moved > 0], axis=1).astype({"Smiling": int, "High_Cheekbones": int}),
            label="Smiling",
            prediction="High_Cheekbones",
            groups=COLUMNS[:columns],
            intersections=crossed,
            n_boot=400,
        )
        false += any(sentence.tone == "bad" for sentence in audit_verdicts(found))
    print(f"{columns} columns{', crossed' * crossed}: {false} of {repeats} audits have a false finding")
    assert false / repeats <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / repeats)
