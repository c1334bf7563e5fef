"""Face data sets as published: exact counts, and labels against an independent reading of the files."""

import hashlib
import io
import zipfile
from collections import Counter, defaultdict

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from fairhead.data import Dataset, read

GENDERS, RACES = ("male", "female"), ("White", "Black", "Asian", "Indian", "Other")


@pytest.fixture(scope="module")
def utkface(real_data) -> Dataset:
    return read("utkface", real_data("images/utkface64.zip"))


def test_utkface_counts(utkface):
    # 23 708 files, 3 of them without a race. The pilot study kept 23 211 images: that is the rule "equal bytes:
    # keep one where gender and race agree, drop all where they do not"; asking for equal age too leaves 23 056.
    assert len(utkface) == 23_211
    assert utkface.skipped_counts == {
        "no race in the file name": 3,
        "exact duplicate": 280,
        "exact duplicates with conflicting labels": 214,
    }
    assert sum(utkface.skipped_counts.values()) + len(utkface) == 23_708
    assert utkface.sizes == {"train": 18_569, "val": 2_321, "test": 2_321}


def test_utkface_against_file_names_and_bytes(utkface, real_data):
    labels = defaultdict(list)
    with zipfile.ZipFile(real_data("images/utkface64.zip")) as z:
        for name in z.namelist():
            fields = name.split("/")[-1].split("_")
            if len(fields) == 4:
                labels[hashlib.md5(z.read(name)).digest()].append((GENDERS[int(fields[1])], RACES[int(fields[2])]))
    kept = [found[0] for found in labels.values() if len(set(found)) == 1]
    races = utkface.groups()["race"].values().tolist()
    genders = [utkface.classes[y] for y in utkface.all.labels]
    assert Counter(zip(genders, races, strict=True)) == Counter(kept)


def test_utkface_with_age_and_with_duplicates(real_data):
    path = real_data("images/utkface64.zip")
    by_age = read("utkface", path, target="age")
    assert len(by_age) == 23_056
    # 259 groups of duplicates disagree in age, gender or race; they hold 531 files.
    assert by_age.skipped_counts["exact duplicates with conflicting labels"] == 531
    assert len(read("utkface", path, drop_duplicates=False)) == 23_705


def test_no_utkface_photograph_is_in_two_parts(utkface):
    arrays = {part: utkface.examples(part).inputs.as_array(None, indices=range(2_000)) for part in utkface.sizes}
    digests = [{hashlib.md5(a.tobytes()).digest() for a in array} for array in arrays.values()]
    assert len(set.union(*digests)) == sum(map(len, digests)) == 6_000


def test_biased_utkface(utkface, real_data):
    biased = read("utkface", real_data("images/utkface64.zip"), bias_rate=0.9)
    train = biased.examples("train")
    white = biased.groups(train.ids)["white"].values() == "White"
    cells = Counter(zip((train.classes[y] for y in train.labels), white.tolist(), strict=True))
    natural = utkface.examples("train")
    natural_white = utkface.groups(natural.ids)["white"].values() == "White"
    before = Counter(zip((natural.classes[y] for y in natural.labels), natural_white.tolist(), strict=True))
    assert cells["male", True] == before["male", True]
    assert cells["female", False] == before["female", False]
    assert cells["female", True] == int(before["male", True] * (1 - 0.9))
    assert cells["male", False] == int(before["female", False] * (1 - 0.9))
    np.testing.assert_array_equal(biased.examples("test").ids, utkface.examples("test").ids)


def test_utkface_pixels_are_pillows(real_data):
    data = read("utkface", real_data("images/utkface64.zip"), drop_duplicates=False)
    some = np.arange(0, len(data), 997)
    array = data.all.inputs.as_array(size=64, indices=some)
    with zipfile.ZipFile(real_data("images/utkface64.zip")) as z:
        names = [n for n in z.namelist() if len(n.split("_")) == 4]
        names.sort(key=lambda n: hashlib.sha256(n.rpartition("/")[2].encode()).hexdigest())
        expected = [np.asarray(Image.open(io.BytesIO(z.read(names[i])))) for i in some]
    np.testing.assert_array_equal(array, expected)


def test_celeba(real_data):
    path = real_data("images/celeba10k.zip")
    data = read("celeba", path)
    with zipfile.ZipFile(path) as z:
        lines = z.read("celeba/list_attr_celeba.txt").decode().splitlines()
        identity = dict(line.split() for line in z.read("celeba/identity_CelebA.txt").decode().splitlines())
    attributes = lines[1].split()
    table = np.array([line.split()[1:] for line in lines[2:]], dtype=int)
    assert (len(attributes), len(data)) == (40, 10_000)
    assert data.all.labels.sum() == (table[:, attributes.index("Attractive")] == 1).sum()
    male = data.groups()["Male"].values() == "Male"
    np.testing.assert_array_equal(male, table[:, attributes.index("Male")] == 1)

    # All images here are in the official train part, so the split is by identity: no person is in two parts.
    assert read("celeba", path, split="official").sizes == {"train": 10_000}
    people = [{identity[i] for i in data.examples(part).ids} for part in ("train", "val", "test")]
    assert len(set.union(*people)) == sum(map(len, people)) == len(set(identity.values()))
    assert {part: round(n / 10_000, 2) for part, n in data.sizes.items()} == {"train": 0.8, "val": 0.1, "test": 0.1}
    blond = read("celeba", path, target="Blond_Hair")
    positive = blond.all.labels[blond.groups()["Male"].values() == "Male"].sum()
    assert positive == ((table[:, attributes.index("Blond_Hair")] == 1) & male).sum() == 81


def test_fairface(real_data):
    path = real_data("images/fairface_val5k.zip")
    data = read("fairface", path, groups=("race", "age", "service_test"))
    with zipfile.ZipFile(path) as z:
        table = pd.read_csv(z.open("fairface/fairface_label_val.csv"))
    assert data.sizes == {"val": 5_000}
    assert len(table) == 5_000
    for name in ("race", "age"):
        assert data.groups()[name].values().tolist() == table[name].tolist()
    assert [data.classes[y] for y in data.all.labels] == table["gender"].tolist()
    assert len(data.groups()["race"].levels) == 7
    assert len(data.groups()["age"].levels) == 9
    assert data.all.inputs[4_999].size == (224, 224)
