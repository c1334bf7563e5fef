"""On CelebA, two clusters of CLIP's features are women and men, and nobody said so."""

import numpy as np

import fairhead


def test_two_clusters_of_faces_are_women_and_men(real_data):
    faces, features = real_data("images/celeba10k.zip"), real_data("features/celeba_0.npz")
    found = fairhead.discover(f"celeba:{faces}", f"features:{features}", groups=["Male"])
    assert len(found.clusters) == 2
    (male,) = found.agreement
    assert male.purity > 0.95
    assert male.adjusted_rand > 0.8
    stable = {one.clusters: np.mean(one.halves) for one in found.stability}
    assert stable[2] > 0.9 > max(stable[k] for k in stable if k != 2)
