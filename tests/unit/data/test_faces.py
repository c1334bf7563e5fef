"""Face data sets in small: names, lists, duplicates, splits and what is broken."""

import shutil
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fairhead.data import Dataset, read
from fairhead.errors import InputError


def _face(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 6), (shade % 256, shade // 256, 7)).save(path, "PNG")


def _zip(folder: Path, path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as z:
        for file in sorted(folder.rglob("*")):
            z.write(file, file.relative_to(folder.parent))
    return path


@pytest.fixture
def utkface(tmp_path: Path) -> Path:
    folder = tmp_path / "UTKFace"
    rng = np.random.default_rng(0)
    for i in range(1000):
        gender, race, age = rng.integers(2), rng.integers(5), rng.integers(1, 100)
        _face(folder / f"{age}_{gender}_{race}_{20170000 + i}.jpg.chip.jpg", i)
    return folder


def _names(data: Dataset) -> dict[str, tuple[str, str]]:
    groups = data.groups()
    rows = zip(data.all.ids.tolist(), data.all.labels.tolist(), groups["race"].values().tolist(), strict=True)
    return {i: (data.classes[y], race) for i, y, race in rows}


def test_utkface_reads_labels_from_names_in_folder_and_zip_alike(utkface, tmp_path):
    folder, archive = read("utkface", utkface), read("utkface", _zip(utkface, tmp_path / "utk.zip"))
    expected = Counter(tuple(p.name.split("_")[1:3]) for p in utkface.iterdir())
    found = Counter(_names(folder).values())
    genders, races = ("male", "female"), ("White", "Black", "Asian", "Indian", "Other")
    assert found == {(genders[int(g)], races[int(r)]): n for (g, r), n in expected.items()}
    assert _names(folder) == _names(archive)
    assert dict(zip(folder.all.ids, folder.split, strict=True)) == dict(
        zip(archive.all.ids, archive.split, strict=True)
    )
    white = folder.groups()["white"].values() == "White"
    assert (white == (folder.groups()["race"].values() == "White")).all()


def test_utkface_ids_and_inputs_do_not_spell_out_groups(utkface):
    train = read("utkface", utkface).examples("train")
    assert all(len(i) == 16 and "_" not in i for i in train.ids)
    assert "_" not in repr(train.inputs).removeprefix(f"Images({len(train)} in {str(utkface)!r})")
    # Nor does their order, which is by age, gender and race in the folder.
    assert train.ids.tolist() == sorted(train.ids.tolist())


def test_utkface_two_pictures_of_one_name_are_named(utkface):
    name = min(utkface.iterdir()).name
    _face(utkface / "part1" / name, 5000)
    with pytest.raises(InputError, match=rf"{name} and .*{name} are two pictures of one name; give the folder"):
        read("utkface", utkface)


def test_utkface_drops_duplicates_by_content(utkface):
    _face(utkface / "30_0_0_1.jpg.chip.jpg", 5000)
    _face(utkface / "30_0_0_2.jpg.chip.jpg", 5000)  # agrees: one stays
    _face(utkface / "31_0_0_3.jpg.chip.jpg", 5000)  # another age
    _face(utkface / "30_0_1_4.jpg.chip.jpg", 6000)
    _face(utkface / "30_1_1_5.jpg.chip.jpg", 6000)  # another gender: both go
    (utkface / "39_1_20170116174525125.jpg.chip.jpg").write_bytes(b"a name without race is never opened")
    data = read("utkface", utkface)
    assert len(data) == 1001
    assert data.skipped_counts == {
        "no race in the file name": 1,
        "exact duplicate": 2,
        "exact duplicates with conflicting labels": 2,
    }
    by_age = read("utkface", utkface, target="age")
    assert len(by_age) == 1000
    assert by_age.skipped_counts["exact duplicates with conflicting labels"] == 5
    assert len(read("utkface", utkface, drop_duplicates=False)) == 1005


def test_utkface_bias_rate_thins_the_training_set_alone(utkface):
    natural, biased = read("utkface", utkface), read("utkface", utkface, bias_rate=0.9)

    def cells(data: Dataset, part: str) -> Counter[tuple[str, bool]]:
        ids = data.examples(part).ids
        white = data.groups(ids)["white"].values() == "White"
        return Counter(zip((data.classes[y] for y in data.examples(part).labels), white.tolist(), strict=True))

    before, after = cells(natural, "train"), cells(biased, "train")
    assert after["male", True] == before["male", True]
    assert after["female", False] == before["female", False]
    assert after["female", True] == int(before["male", True] * (1 - 0.9))
    assert after["male", False] == int(before["female", False] * (1 - 0.9))
    for part in ("val", "test"):
        np.testing.assert_array_equal(natural.examples(part).ids, biased.examples(part).ids)
    assert biased.skipped_counts["left out by bias_rate"] == len(natural) - len(biased)
    with pytest.raises(InputError, match="bias_rate needs target='gender'"):
        read("utkface", utkface, bias_rate=0.9, target="race")


def test_utkface_broken_names_and_images_raise_or_are_counted(utkface):
    (utkface / "selfie.jpg").write_bytes(b"x")
    with pytest.raises(InputError, match=r"selfie\.jpg: the name is not age_gender_race_time"):
        read("utkface", utkface)
    broken = next(utkface.glob("*_0_0_*"))
    broken.write_bytes(broken.read_bytes()[:40])
    data = read("utkface", utkface, on_error="skip")
    assert data.skipped == {"file name does not parse": ("selfie.jpg",), "not a readable image": (broken.name,)}
    assert len(data) == 999


def test_utkface_a_damaged_member_of_the_archive_raises_or_is_counted(utkface, tmp_path):
    archive = _zip(utkface, tmp_path / "u.zip")
    with zipfile.ZipFile(archive) as z:
        victim = z.infolist()[5]
    data = bytearray(archive.read_bytes())
    data[victim.header_offset + 30 + len(victim.filename) + 20] ^= 0xFF  # a byte of the picture: the checksum is off
    archive.write_bytes(bytes(data))
    with pytest.raises(InputError, match=f"{victim.filename}: damaged in the archive"):
        read("utkface", archive)
    assert read("utkface", archive, on_error="skip").skipped == {"not a readable image": (victim.filename,)}


def test_age_bins_must_cover_the_ages(utkface):
    ages = read("utkface", utkface, groups=("age",), age_bins=(0, 18, 65)).groups()["age"]
    expected = Counter(
        "00-17" if age < 18 else "18-64" if age < 65 else "65+"
        for age in (int(p.name.split("_")[0]) for p in utkface.iterdir())
    )
    assert Counter(ages.values().tolist()) == expected
    with pytest.raises(InputError, match="age bins must rise"):
        read("utkface", utkface, groups=("age",), age_bins=(18, 65))


@pytest.fixture
def celeba(tmp_path: Path) -> Path:
    folder = tmp_path / "celeba"
    rng = np.random.default_rng(1)
    attributes = ["Attractive", "Blond_Hair", "Male"]
    names = [f"{i:06}.jpg" for i in range(1, 301)]
    values = rng.choice([-1, 1], (300, 3))
    for i, name in enumerate(names):
        _face(folder / "img_align_celeba" / name, i)
    rows = [f"{n}  " + " ".join(f"{v:2}" for v in row) for n, row in zip(names, values, strict=True)]
    (folder / "list_attr_celeba.txt").write_text("\n".join(["300", " ".join(attributes), *rows]) + "\n")
    (folder / "list_eval_partition.txt").write_text("".join(f"{n} {i % 3}\n" for i, n in enumerate(names)))
    (folder / "identity_CelebA.txt").write_text("".join(f"{n} {i % 40}\n" for i, n in enumerate(names)))
    return folder


def test_celeba_official_split_in_every_layout(celeba, tmp_path):
    data = read("celeba", celeba, target="Blond_Hair")
    assert data.sizes == {"train": 100, "val": 100, "test": 100}
    assert data.classes == ("no", "yes")
    table = [line.split() for line in (celeba / "list_attr_celeba.txt").read_text().splitlines()[2:]]
    assert data.all.ids.tolist() == [row[0] for row in table]
    assert data.all.labels.tolist() == [int(row[2] == "1") for row in table]
    assert data.groups()["Male"].values().tolist() == ["Male" if row[3] == "1" else "not Male" for row in table]

    pixels = data.all.inputs.as_array(6)
    archived = read("celeba", _zip(celeba, tmp_path / "celeba.zip"), target="Blond_Hair")
    # As downloaded: lists in folders of their own, images still in their archive.
    for file, folder in (("list_attr_celeba", "Anno"), ("identity_CelebA", "Anno"), ("list_eval_partition", "Eval")):
        (celeba / folder).mkdir(exist_ok=True)
        shutil.move(celeba / f"{file}.txt", celeba / folder)
    (celeba / "Img").mkdir()
    _zip(celeba / "img_align_celeba", celeba / "Img/img_align_celeba.zip")
    shutil.rmtree(celeba / "img_align_celeba")
    downloaded = read("celeba", celeba, target="Blond_Hair")
    for other in (archived, downloaded):
        np.testing.assert_array_equal(other.split, data.split)
        np.testing.assert_array_equal(other.all.inputs.as_array(6), pixels)


def test_celeba_splits_by_identity_where_parts_are_missing(celeba):
    names = [line.split()[0] for line in (celeba / "list_eval_partition.txt").read_text().splitlines()]
    (celeba / "list_eval_partition.txt").write_text("".join(f"{n} 0\n" for n in names))
    data = read("celeba", celeba)
    identity = data.attributes.cluster
    assert identity is not None
    parts = {}
    for person, part in zip(identity.values().tolist(), data.split.tolist(), strict=True):
        parts.setdefault(person, set()).add(part)
    assert len(parts) == 40
    assert all(len(p) == 1 for p in parts.values())
    assert set(data.sizes) == {"train", "val", "test"}
    assert read("celeba", celeba, split="official").sizes == {"train": 300}
    (celeba / "identity_CelebA.txt").unlink()
    with pytest.raises(InputError, match=r"CelebA needs identity_CelebA\.txt to split by identity"):
        read("celeba", celeba)


def test_celeba_broken_files_are_named(celeba):
    with pytest.raises(InputError, match=r"no target 'Blonde_Hair'.*Did you mean 'Blond_Hair'"):
        read("celeba", celeba, target="Blonde_Hair")
    (celeba / "img_align_celeba/000007.jpg").unlink()
    with pytest.raises(InputError, match=r"images in list_attr_celeba\.txt is not there: 000007\.jpg"):
        read("celeba", celeba)
    (celeba / "img_align_celeba/000009.jpg").write_bytes(b"gone bad")
    data = read("celeba", celeba, on_error="skip")
    assert {reason: len(names) for reason, names in data.skipped.items()} == {
        "image is missing": 1,
        "not a readable image": 1,
    }
    assert len(data) == 298
    attributes = celeba / "list_attr_celeba.txt"
    whole = attributes.read_text()
    attributes.write_text(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"list_attr_celeba\.txt: .*"):
        read("celeba", celeba)
    attributes.write_text("\n".join(whole.splitlines()[:100]))
    with pytest.raises(InputError, match="announces 300 images and holds 98 rows"):
        read("celeba", celeba)


def test_celeba_lists_that_are_swapped_or_repeat_themselves_are_named(celeba):
    parts = celeba / "list_eval_partition.txt"
    whole = parts.read_text()
    first = whole.splitlines()[0]
    parts.write_text(first.split()[0] + " -1\n" + whole.partition("\n")[2])
    with pytest.raises(InputError, match="parts other than 0, 1 and 2, such as -1"):
        read("celeba", celeba, split="official")
    shutil.copy(celeba / "identity_CelebA.txt", parts)
    with pytest.raises(InputError, match="Is it another of the lists"):
        read("celeba", celeba, split="official")
    parts.write_text(f"{first}\n{whole}")
    with pytest.raises(InputError, match=rf"{first.split()[0]} is there twice"):
        read("celeba", celeba)


@pytest.fixture
def fairface(tmp_path: Path) -> Path:
    folder = tmp_path / "fairface"
    for part, n in (("train", 30), ("val", 10)):
        rows = ["file,age,gender,race,service_test"]
        for i in range(1, n + 1):
            _face(folder / part / f"{i}.jpg", i)
            rows.append(f"{part}/{i}.jpg,3-9,{'Male' if i % 2 else 'Female'},{'East Asian' if i % 3 else 'White'},True")
        (folder / f"fairface_label_{part}.csv").write_text("\n".join(rows))
    return folder


def test_fairface_reads_its_official_split(fairface, tmp_path):
    data = read("fairface", fairface, groups=("race", "service_test"))
    assert data.sizes == {"train": 30, "val": 10}
    assert data.classes == ("Female", "Male")
    assert Counter(data.groups()["race"].values().tolist()) == {"East Asian": 27, "White": 13}
    archive = _zip(fairface, tmp_path / "fairface.zip")
    np.testing.assert_array_equal(read("fairface", archive).all.ids, data.all.ids)
    # As downloaded: labels beside the archive of images.
    beside = tmp_path / "beside"
    beside.mkdir()
    shutil.move(archive, beside / "fairface-img-margin025-trainval.zip")
    for part in ("train", "val"):
        shutil.copy(fairface / f"fairface_label_{part}.csv", beside)
    np.testing.assert_array_equal(read("fairface", beside).all.inputs.as_array(6), data.all.inputs.as_array(6))
    shuffled = read("fairface", fairface, split="random")
    assert shuffled.sizes == {"train": 32, "val": 4, "test": 4}


def test_fairface_broken_files_are_named(fairface):
    (fairface / "val/3.jpg").unlink()
    with pytest.raises(InputError, match=r"images in the label file is not there: val/3\.jpg"):
        read("fairface", fairface)
    assert read("fairface", fairface, on_error="skip").skipped == {"image is missing": ("val/3.jpg",)}
    labels = fairface / "fairface_label_val.csv"
    labels.write_text(labels.read_text()[:-12])
    with pytest.raises(InputError, match=r"fairface_label_val\.csv: line 11 has an empty field"):
        read("fairface", fairface)
    labels.write_text("file,age\nval/1.jpg,3-9\n")
    with pytest.raises(InputError, match="has no column 'gender'; it has file, age"):
        read("fairface", fairface)
    header, _, rows = (fairface / "fairface_label_train.csv").read_text().partition("\n")
    labels.write_text(header + "\n")
    with pytest.raises(InputError, match="has a header and no row"):
        read("fairface", fairface)
    labels.write_text("\n".join([header, *rows.split("\n")[:2], rows.split("\n")[0]]))
    with pytest.raises(InputError, match=r"train/1\.jpg is there twice"):
        read("fairface", fairface)
    with pytest.raises(InputError, match=r"FairFace needs .*this file holds 1 file:"):  # and is not parsed first
        read("fairface", labels)
