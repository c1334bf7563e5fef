"""Groups that nobody named: clusters that are known in closed form, tiny encoders, gaps that are paid for."""

import csv
import json

import made_posts
import numpy as np
import pandas as pd
import pytest
import torch
import transformers as hf
from made_faces import make_faces
from made_vit import saved_vit
from sklearn.metrics import adjusted_rand_score

import fairhead
from fairhead.cli import main
from fairhead.discover.clustering import agreement_of, telling_words
from fairhead.discover.discovered import DISCOVERED, largest_gap
from fairhead.errors import InputError
from fairhead.models.attached import LinearHead
from fairhead.records import Column, Records

SIZES = (150, 90, 60)


@pytest.fixture(scope="module")
def blobs(tmp_path_factory):
    """Posts in three blobs of features, in random order, with the files of both; the words name the blob."""
    folder, rng = tmp_path_factory.mktemp("blobs"), np.random.default_rng(0)
    blob = rng.permutation(np.repeat(np.arange(3), SIZES))
    features = 10 * np.eye(3, 6)[blob] + rng.normal(scale=0.3, size=(len(blob), 6))
    ids = np.array([f"post-{i}" for i in range(len(blob))])
    np.savez(folder / "features.npz", features=features.astype(np.float32), names=ids)
    names = np.array(["alpha", "beta", "gamma"])
    texts = [f"<script>alert({i})</script> about {names[b]} and so on" for i, b in enumerate(blob)]
    label = np.where(rng.random(len(blob)) < np.array([0.2, 0.5, 0.8])[blob], "yes", "no")
    frame = pd.DataFrame(
        {"id": ids, "text": texts, "label": label, "blob": names[blob], "coin": rng.choice(["h", "t"], len(blob))}
    )
    frame.to_csv(folder / "posts.csv", index=False)
    return folder, frame


def found_in(blobs, **options):
    folder, _ = blobs
    return fairhead.discover(f"texts:{folder / 'posts.csv'}", f"features:{folder / 'features.npz'}", **options)


def test_blobs_are_found_and_described(blobs):
    _, frame = blobs
    found = found_in(blobs, groups=["blob", "coin"])
    assert [one.size for one in found.clusters] == list(SIZES)
    assert found.clusters[0].groups["blob"] == ("alpha", 1.0)
    for one, name in zip(found.clusters, ("alpha", "beta", "gamma"), strict=True):
        rows = frame[frame.blob == name]
        assert one.classes["yes"] == pytest.approx((rows.label == "yes").mean())
        assert one.words[0] == name
        assert len(one.typical) == 5
        assert {frame.blob[i] for i in one.typical} == {name}
    stable = {one.clusters: np.mean(one.halves) for one in found.stability}
    assert max(stable, key=stable.get) == 3
    assert stable[3] == pytest.approx(1)
    blob, coin = found.agreement
    assert (blob.purity, blob.adjusted_rand, blob.alone) == (1, 1, 0.5)
    assert abs(coin.adjusted_rand) < 0.05
    texts = [sentence.text for sentence in found.page().verdict]
    assert texts[0].startswith("300 texts form 3 clusters")
    assert texts[1].endswith("the clusters are nearly these groups.")
    assert texts[2].endswith("the clusters are hardly these groups.")
    assert found.to_frame()["share of yes"].is_monotonic_increasing


def test_a_page_names_files_without_their_folders_and_rows_in_memory_as_such(blobs):
    folder, frame = blobs
    assert found_in(blobs).page().question == "Which groups does features.npz find in texts:posts.csv?"
    found = fairhead.discover(frame, f"features:{folder / 'features.npz'}")
    assert found.page().question == "Which groups does features.npz find in rows given in Python?"


def test_typical_rows_are_those_nearest_to_the_centre(blobs):
    folder, _ = blobs
    found = found_in(blobs)
    features = np.load(folder / "features.npz")["features"]
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    rows = np.flatnonzero(found.grouping.column.codes == 1)
    away = np.linalg.norm(features[rows] - features[rows].mean(0), axis=1)
    assert list(found.clusters[1].typical) == rows[np.argsort(away)[:5]].tolist()


def test_what_is_written_is_escaped_and_can_be_taken_on(blobs, tmp_path):
    folder, frame = blobs
    found = found_in(blobs, out=tmp_path, clusters=3)
    page = (tmp_path / "report.html").read_text()
    assert "&lt;script&gt;alert(" in page
    assert "<script>alert" not in page
    assert json.loads((tmp_path / "report.json").read_text())["sections"][0]["kind"] == "clusters"
    content = json.loads((tmp_path / "discovered.json").read_text())
    assert content["schema"] == "fairhead.discovered/1"
    assert [one["size"] for one in content["clusters"]] == list(SIZES)
    rows = list(csv.DictReader((tmp_path / "groups.csv").read_text().splitlines()))
    assert {row["discovered"] for row in rows} == {"cluster 1", "cluster 2", "cluster 3"}
    again = fairhead.dataset(
        f"texts:{folder / 'posts.csv'}", groups=["discovered"], groups_from=tmp_path / "groups.csv"
    )
    assert again.groups()["discovered"].values().tolist() == found.dataset.groups()["discovered"].values().tolist()
    by_blob = pd.crosstab(again.groups()["discovered"].values(), frame.blob.to_numpy())
    assert ((by_blob > 0).sum(axis=1) == 1).all()


def test_words_of_the_same_space_are_named(blobs, tmp_path):
    vectors = np.eye(4, 6, dtype=np.float32)
    np.savez(tmp_path / "words.npz", texts=["first", "second", "third", "[PAD]"], vectors=vectors)
    found = found_in(blobs, words=tmp_path / "words.npz")
    assert [one.words[0] for one in found.clusters] == ["first", "second", "third"]
    np.savez(tmp_path / "narrow.npz", texts=["a"], vectors=np.ones((1, 2)))
    with pytest.raises(InputError, match=r"shape \[1, 2\], and the features are of width 6"):
        found_in(blobs, words=tmp_path / "narrow.npz")
    (tmp_path / "words.txt").write_text("a")
    with pytest.raises(InputError, match=r"is not an \.npz file with the arrays texts, vectors"):
        found_in(blobs, words=tmp_path / "words.txt")


def test_a_rare_word_does_not_win_by_chance():
    texts = ["cat sat"] * 40 + ["cat sat once"] * 2 + ["dog sat"] * 40
    column = Column(np.repeat([0, 1], [42, 40]), ("cluster 1", "cluster 2"))
    assert telling_words(texts, column) == [("cat",), ("dog",)]


def test_agreement_is_that_of_scikit_learn():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 5, 500), rng.integers(0, 3, 500)
    b[a == 1] = 2
    found = agreement_of("b", Column(a, tuple("abcde")), Column(b, tuple("xyz")))
    assert found.adjusted_rand == pytest.approx(adjusted_rand_score(a, b))
    assert found.purity == pytest.approx(pd.crosstab(a, b).max(axis=1).sum() / 500)


def records_of(cluster, error, rng, units=None):
    """Predictions that err with a probability a cluster."""
    label = rng.integers(0, 2, len(cluster))
    guess = np.where(rng.random(len(cluster)) < np.asarray(error)[cluster], 1 - label, label)
    names = tuple(f"cluster {i + 1}" for i in range(len(error)))
    column = None if units is None else Column(units, tuple(np.unique(units).tolist()))
    return Records(
        Column(label, (0, 1)), Column(guess, (0, 1)), groups={DISCOVERED: Column(cluster, names)}, cluster=column
    )


def test_the_worst_of_many_clusters_is_paid_for():
    """Where no cluster differs, the largest of 120 gaps is large, and its interval in the other half is not off 0."""
    above, significant = [], 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        gap = largest_gap(records_of(rng.integers(0, 16, 3200), [0.3] * 16, rng), seed)
        assert gap.of == 120
        found = gap.audit["EOd", DISCOVERED]
        above.append(gap.chosen_at - found.value)
        significant += found.low > 0
    assert np.mean(above) > 0.1, "what was chosen for being large is too large"
    assert significant <= 3


def test_a_true_gap_is_found_and_reported():
    rng = np.random.default_rng(0)
    gap = largest_gap(records_of(rng.integers(0, 6, 3000), [0.1, 0.1, 0.5, 0.1, 0.1, 0.1], rng))
    assert "cluster 3" in gap.pair
    assert gap.audit["EOd", DISCOVERED].low > 0.2


def test_rows_of_one_person_stay_in_one_half():
    rng = np.random.default_rng(0)
    units = np.repeat(np.arange(200), 5)
    gap = largest_gap(records_of(units % 2, [0.1, 0.3], rng, units))
    assert (gap.of, gap.chosen_at, gap.chosen_on) == (1, None, 0), "of one pair there is nothing to choose"
    assert gap.audit.provenance["audit"]["n"] == 1000
    units = np.tile(np.arange(200), 5)  # who is in several clusters
    gap = largest_gap(records_of(np.repeat([0, 1, 2, 3, 4], 200) % 4, [0.1, 0.3, 0.1, 0.1], rng, units))
    assert gap.of == 6
    assert gap.chosen_on == 500
    assert gap.audit.provenance["audit"]["n"] in (200, 300)
    assert largest_gap(records_of(np.arange(8) % 2, [0.1, 0.3], rng)) is None


def test_bad_input_is_one_line(blobs, tmp_path):
    folder, _ = blobs
    with pytest.raises(InputError, match="500 clusters of 300 rows"):
        found_in(blobs, clusters=500)
    with pytest.raises(InputError, match="at least 2 are needed"):
        found_in(blobs, clusters=1)
    with pytest.raises(InputError, match="no column 'sexx'"):
        found_in(blobs, groups=["sexx"])
    data = fairhead.dataset(f"texts:{folder / 'posts.csv'}", groups=["blob"])
    with pytest.raises(InputError, match="no group column 'blobb'"):
        fairhead.discover(data, f"features:{folder / 'features.npz'}", groups=["blobb"])
    ready = dict(np.load(folder / "features.npz"))
    ready["features"][7, 2] = np.nan
    np.savez(tmp_path / "nan.npz", **ready)
    with pytest.raises(InputError, match=r"1 of 300 rows are not finite .* those of post-7"):
        fairhead.discover(data, f"features:{tmp_path / 'nan.npz'}")
    np.savez(tmp_path / "same.npz", **{**ready, "features": np.ones((300, 6), np.float32)})
    with pytest.raises(InputError, match="all rows have the same features"):
        fairhead.discover(data, f"features:{tmp_path / 'same.npz'}", clusters=2)
    with pytest.raises(InputError, match="fresh weights"):
        fairhead.discover(data, "vit-2x2")


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    made_posts.planted_bert().save_pretrained(folder)
    made_posts.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def posts(tmp_path_factory):
    rng, rows = np.random.default_rng(0), []
    for i in range(400):
        words = [made_posts.FILLERS[k] for k in rng.choice(len(made_posts.FILLERS), rng.integers(4, 8))]
        words[0] = "women" if i % 2 else words[0]
        rows.append([" ".join(words), ("normal", "toxic")[i // 2 % 2], ("women", "nobody")[i % 2 == 0]])
    file = tmp_path_factory.mktemp("own") / "posts.csv"
    pd.DataFrame(rows, columns=["text", "verdict", "about"]).to_csv(file, index=False)
    return file


def test_an_encoder_of_pictures_is_asked_once(tmp_path):
    faces = make_faces(tmp_path / "faces")
    saved_vit(tmp_path / "vit")
    told = []
    how = {"cache": tmp_path / "cache", "progress": lambda *stage: told.append(stage), "device": "cpu"}
    found = fairhead.discover(f"utkface:{faces}", tmp_path / "vit", clusters=2, out=tmp_path / "out", **how)
    assert {stage for stage, _, _ in told} == {"decode", "encode"}
    assert (tmp_path / "out" / "report.html").read_text().count("data:image/jpeg;base64,") == 16
    told.clear()
    again = fairhead.discover(f"utkface:{faces}", tmp_path / "vit", clusters=2, **how)
    assert not told
    assert again.grouping.column.codes.tolist() == found.grouping.column.codes.tolist()


def test_an_encoder_that_carries_dam_reads_texts_of_the_length_that_it_was_trained_with(bert, posts, tmp_path):
    model = fairhead.attach(hf.AutoModelForSequenceClassification.from_pretrained(bert), fairhead.DAM()).train()
    ids = torch.randint(1, 9, (8, 6))
    model(input_ids=ids, attention_mask=torch.ones_like(ids))
    model.save_pretrained(tmp_path)
    made_posts.tokenizer().save_pretrained(tmp_path)
    assert fairhead.discover(f"texts:{posts}", tmp_path, label="verdict", clusters=2, device="cpu").clusters


def test_an_encoder_must_be_of_the_kind_of_the_data(bert, posts, tmp_path):
    faces = make_faces(tmp_path / "faces", n=16)
    saved_vit(tmp_path / "vit")
    with pytest.raises(InputError, match="reads texts and the data are pictures: give an encoder of pictures"):
        fairhead.discover(f"utkface:{faces}", bert)
    with pytest.raises(InputError, match="reads pictures and the data are texts: give an encoder of texts"):
        fairhead.discover(f"texts:{posts}", tmp_path / "vit", label="verdict")


def test_the_command_audits_a_model_and_others_take_its_groups(bert, posts, tmp_path, capsys):
    columns = ["--data", f"texts:{posts}", "--label", "verdict"]
    asked = ["--encoder", str(bert), "--model", str(bert), "--part", "all", "--clusters", "2", "--group", "about"]
    main(["discover", *columns, *asked, "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "found")])
    said = capsys.readouterr()
    assert "encode: 400 of 400" in said.err
    assert "Between cluster 1 and cluster 2, EOd is" in said.out
    assert said.out.count("discovered: gaps") == 1, "two clusters are one pair"
    content = json.loads((tmp_path / "found" / "discovered.json").read_text())
    assert content["agreement"][0]["purity"] > 0.9, "the word “women” is the largest difference between the posts"
    gap = next(e for e in content["gap"]["audit"]["estimates"] if e["metric"] == "EOd")
    assert gap["low"] > 0.2
    groups = ["--groups-from", str(tmp_path / "found" / "groups.csv")]
    main(["locate", "--model", str(bert), *columns, *groups, "--group", "discovered", "--heads", "1", "--n-boot", "100",
          "--draws", "3", "--out", str(tmp_path / "heads")])  # fmt: skip
    heads = json.loads((tmp_path / "heads" / "headmap.json").read_text())
    assert heads["selected"] == [list(made_posts.PLANTED)]
    assert heads["concept"]["poles"] == ["cluster 1", "cluster 2"]
    records = fairhead.predict(bert, f"texts:{posts}", part="all", label="verdict")
    records.save(tmp_path / "records.csv")
    main(["audit", str(tmp_path / "records.csv"), "--label", "label", "--pred", "prediction", *groups])
    assert "groups by discovered (2)" in capsys.readouterr().out
    given = fairhead.discover(f"texts:{posts}", bert, label="verdict", model=tmp_path / "records.csv", clusters=2,
                              cache=tmp_path / "cache")  # fmt: skip
    assert given.gap.audit["EOd", DISCOVERED].value == pytest.approx(gap["value"])


def test_mitigate_audits_by_discovered_groups(tmp_path):
    faces = make_faces(tmp_path / "faces", hard=True)
    saved_vit(tmp_path / "vit")
    found = fairhead.discover(f"utkface:{faces}", tmp_path / "vit", clusters=2, cache=tmp_path / "cache", device="cpu")
    settings = {"width": 16, "mlp": 16, "image_size": 8, "patch_size": 4}
    run = fairhead.mitigate(
        "vit-2x2", found.dataset, "erm", out=tmp_path / "run", epochs=1, batch_size=32, model_options=settings,
        device="cpu", cache=str(tmp_path / "cache"),
    )  # fmt: skip
    assert "discovered" in {row.group_by for row in run.audit.by_group}
    found.save(tmp_path / "found")
    given = [
        "--groups-from",
        str(tmp_path / "found" / "groups.csv"),
        "--group",
        "discovered",
        "--epochs",
        "1",
        "--batch-size",
        "32",
    ]
    shape = [part for name, value in settings.items() for part in ("--model-option", f"{name}={value}")]
    main(["mitigate", "erm", "--data", f"utkface:{faces}", "--model", "vit-2x2", *shape, *given, "--device", "cpu",
          "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "again")])  # fmt: skip
    content = json.loads((tmp_path / "again" / "audit.json").read_text())
    assert {row["group_by"] for row in content["by_group"]} == {"discovered"}
    # What nobody set is the same in Python and on the command line: the models are equal.
    ours, theirs = run.model.state_dict(), fairhead.load(tmp_path / "again" / "model").state_dict()
    assert all(torch.equal(weight.cpu(), theirs[name].cpu()) for name, weight in ours.items())


def test_a_pair_is_chosen_on_half_of_the_rows(bert, posts, tmp_path):
    how = {"label": "verdict", "model": bert, "part": "all", "cache": tmp_path, "device": "cpu"}
    found = fairhead.discover(f"texts:{posts}", bert, clusters=3, **how)
    assert found.gap.of == 3
    assert found.gap.chosen_on == pytest.approx(200, abs=3)
    assert found.gap.audit.provenance["audit"]["n"] < 200
    assert "in one half of the rows is that of" in found.page().verdict[-1].text
    assert [section.kind for section in found.page().sections] == ["clusters", "tables", "audit", "audit"]


def test_a_linear_head_is_given_the_features(blobs):
    folder, _ = blobs
    features = torch.from_numpy(np.load(folder / "features.npz")["features"])
    head = LinearHead.of(features, ("no", "yes"))
    with torch.no_grad():
        head.last.weight[1, 2] = 9.0  # says yes to the third blob alone
    found = found_in(blobs, model=head, part="all", clusters=3)
    yes = {row.group: row.rates["selection_rate"].value for row in found.audit.by_group}
    assert yes == {"cluster 1": 0, "cluster 2": 0, "cluster 3": 1}
    narrow = LinearHead.of(features[:, :2], ("no", "yes"))
    with pytest.raises(InputError, match="linear head on 2 features, but the encoder has 6"):
        found_in(blobs, model=narrow)


def test_a_live_encoder(posts):
    model = made_posts.planted_bert()
    found = fairhead.discover(f"texts:{posts}", model, label="verdict", beside=made_posts.tokenizer(), clusters=2)
    assert sum(one.size for one in found.clusters) == 400
    assert torch.is_grad_enabled()
