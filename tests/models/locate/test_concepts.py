"""Concept directions and tasks from texts and from images."""

import numpy as np
import pytest
import torch
import transformers as hf
from families import TEXT, TOWERS
from made_towers import tokenizer
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression

from fairhead.errors import InputError, UnsupportedModel
from fairhead.locate.directions import (
    Task,
    concept_from_images,
    concept_from_texts,
    fit_logistic,
    task_from_images,
    task_from_texts,
)
from fairhead.locate.prompts import (
    AdaptedText,
    ClipText,
    Pole,
    Prompts,
    known_prompts,
    read_prompts,
    read_text_table,
)


@pytest.fixture(scope="module")
def clip():
    torch.manual_seed(0)
    return hf.CLIPModel(hf.CLIPConfig(**TOWERS)).eval()


def test_the_direction_is_the_difference_of_the_poles_means_through_clips_own_tower(clip) -> None:
    prompts = Prompts(
        "gender", (Pole("f", ("woman", "girl"), ()), Pole("m", ("man", "boy"), ())), ("person",), ("a {}", "{}")
    )
    found = concept_from_texts(prompts, ClipText(clip, tokenizer()))
    ends = []
    for words in (("woman", "girl"), ("man", "boy")):
        texts = [t.format(w) for t in ("a {}", "{}") for w in words]
        vectors = []
        for text in texts:  # one by one: no padding
            with torch.no_grad():
                vector = clip.get_text_features(**tokenizer()(text, return_tensors="pt")).pooler_output[0]
            vectors.append(vector / vector.norm())
        ends.append(torch.stack(vectors).mean(0))
    expected = (ends[0] - ends[1]) / (ends[0] - ends[1]).norm()
    np.testing.assert_allclose(found.vector, expected.numpy(), atol=1e-5)
    assert found.detail["prompts"]["f"] == ["a woman", "a girl", "woman", "girl"]


def test_a_siglip_has_a_text_side_too() -> None:
    torch.manual_seed(0)
    model = hf.SiglipModel(hf.SiglipConfig(**TOWERS)).eval()
    vectors = ClipText(model, tokenizer())(["a woman", "a man"])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1)
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-4


def test_prompts_without_a_token_are_refused(clip) -> None:
    side = ClipText(clip, tokenizer())
    for texts in (["woman", " "], [""]):
        with pytest.raises(InputError, match="has no token in it"):
            side(texts)
    with pytest.raises(InputError, match="no prompts"):
        side([])
    with pytest.raises(UnsupportedModel, match="CLIPVisionModel has no text tower"):
        ClipText(clip.vision_model, tokenizer())


def test_poles_must_be_balanced_and_templates_have_a_place() -> None:
    with pytest.raises(InputError, match="2 words for f and 1 for m"):
        Prompts("gender", (Pole("f", ("woman", "girl"), ()), Pole("m", ("man",), ())))
    with pytest.raises(InputError, match=r"has no \{\} for the word"):
        Prompts("gender", (Pole("f", ("woman",), ()), Pole("m", ("man",), ())), templates=("a photo",))
    same = Prompts("gender", (Pole("f", ("person",), ()), Pole("m", ("person",), ())))
    with pytest.raises(InputError, match="same prompts"):
        concept_from_texts(same, lambda texts: np.ones((len(texts), 4)))
    with pytest.raises(InputError, match="Did you mean 'gender'"):
        known_prompts().concept("gendre")
    with pytest.raises(InputError, match="there are some for gender, race, age"):
        known_prompts().words("fairface", "service_test")


def test_every_shipped_concept_is_balanced_with_as_many_neutral_words() -> None:
    for prompts in known_prompts().concepts.values():
        assert len(prompts.neutral) == len(prompts.poles[0].words) == len(prompts.poles[1].words)
        assert not set(prompts.poles[0].levels) & set(prompts.poles[1].levels)


def test_a_table_has_a_vector_for_each_text(tmp_path) -> None:
    np.savez(tmp_path / "t.npz", texts=np.array(["a dog", "a cat"]), vectors=np.eye(2, dtype=np.float16))
    texts, vectors = read_text_table(tmp_path / "t.npz")
    assert texts == ("a dog", "a cat")
    assert vectors.dtype == np.float64
    np.savez(tmp_path / "w.npz", texts=np.array(["a"]), vectors=np.eye(2))
    with pytest.raises(InputError, match="found 1 texts, 2 vectors"):
        read_text_table(tmp_path / "w.npz")
    np.savez(tmp_path / "u.npz", texts=np.array(["a"]))
    with pytest.raises(InputError, match=r"is not an \.npz file with the arrays texts, vectors"):
        read_text_table(tmp_path / "u.npz")
    (tmp_path / "v.npz").write_text("x")
    with pytest.raises(InputError, match=r"is not an \.npz file|cannot be read"):
        read_text_table(tmp_path / "v.npz")


def test_the_stand_in_is_a_mean_pool_and_a_linear_map() -> None:
    torch.manual_seed(0)
    encoder = hf.BertModel(hf.BertConfig(**TEXT)).eval()
    rng = np.random.default_rng(0)
    matrix, mean = rng.normal(size=(32, 6)), rng.normal(size=32) * 0.01
    found = AdaptedText(encoder, tokenizer(), matrix, mean)(["a woman", "a photo of a man"])
    for row, text in enumerate(["a woman", "a photo of a man"]):
        with torch.no_grad():
            ids = tokenizer()(text, return_tensors="pt")["input_ids"]
            x = encoder(ids).last_hidden_state[0].mean(0).double().numpy()
        vector = (x / np.linalg.norm(x) - mean) @ matrix
        np.testing.assert_allclose(found[row], vector / np.linalg.norm(vector), atol=1e-5)
    with pytest.raises(InputError, match="belongs to another encoder"):
        AdaptedText(encoder, tokenizer(), matrix[:9], mean)


def labelled(n=300, d=6, seed=0):
    rng = np.random.default_rng(seed)
    groups, labels = rng.integers(0, 2, n), rng.integers(0, 2, n)
    mixing = rng.normal(size=(d, d))
    x = rng.normal(size=(n, d)) @ mixing + 1.5 * groups[:, None] * mixing[0] + 5 * labels[:, None] * mixing[1]
    return x, groups, labels


def test_directions_from_images_agree_with_scikit_learn() -> None:
    x, groups, labels = labelled(40_000)  # so many that shrinkage has nothing to say
    rows = labels == 0
    one = {"name": "g", "poles": ("f", "m")}
    zeros = np.zeros(rows.sum(), dtype=int)
    means = concept_from_images(x[rows], groups[rows], zeros, **one).vector
    difference = x[rows & (groups == 1)].mean(0) - x[rows & (groups == 0)].mean(0)
    np.testing.assert_allclose(means, difference / np.linalg.norm(difference))
    lda = LinearDiscriminantAnalysis().fit(x[rows], groups[rows]).coef_[0]
    leace = concept_from_images(x[rows], groups[rows], zeros, method="leace", **one).vector
    assert leace @ lda / np.linalg.norm(lda) > 0.999
    with pytest.raises(InputError, match="method is 'pca'"):
        concept_from_images(x, groups, labels, method="pca", **one)


def test_a_direction_given_the_label_does_not_follow_the_label() -> None:
    x, groups, labels = labelled(4000)
    groups = np.where(np.random.default_rng(1).random(4000) < 0.3, labels, groups)  # groups follow the label somewhat
    one = {"name": "g", "poles": ("f", "m")}
    naive = concept_from_images(x, groups, np.zeros(4000, dtype=int), **one).vector
    given = concept_from_images(x, groups, labels, **one).vector
    of_label = x[labels == 1].mean(0) - x[labels == 0].mean(0)
    of_label /= np.linalg.norm(of_label)
    assert abs(given @ of_label) < abs(naive @ of_label)


def test_few_images_are_shrunk_and_said() -> None:
    rng = np.random.default_rng(0)
    x, groups = rng.normal(size=(20, 40)), np.arange(20) % 2
    for method in ("leace", "logistic"):
        found = concept_from_images(x, groups, np.zeros(20, dtype=int), name="g", poles=("f", "m"), method=method)
        assert "20 images for 40 dimensions" in found.detail["few"]
        assert np.isfinite(found.vector).all()
    with pytest.raises(InputError, match="the group 'm' has 0 rows of the class 0"):
        concept_from_images(x, np.ones(20, dtype=int), np.zeros(20, dtype=int), name="g", poles=("f", "m"))


def test_the_probe_is_logistic_regression() -> None:
    x, _, labels = labelled(400)
    three = (labels + (x[:, 2] > 0)).astype(int)
    scaled = (x - x.mean(0)) / x.std(0)
    reference = LogisticRegression(C=1.0, max_iter=5000, tol=1e-10).fit(scaled, three)
    weights, bias = fit_logistic(x, three, 3, ridge=1.0)
    expected = reference.predict_proba(scaled)
    logits = x @ weights.T + bias
    found = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=1e-3)
    assert task_from_images(x, three, ("a", "b", "c")).classes == ("a", "b", "c")


def test_orthogonal_to_the_classes() -> None:
    rng = np.random.default_rng(0)
    task = Task(("a", "b", "c"), rng.normal(size=(3, 8)), np.zeros(3), "made")
    x, groups, labels = labelled(d=8)
    concept = concept_from_images(x, groups, labels, name="g", poles=("f", "m")).orthogonal_to(task)
    differences = task.directions[1:] - task.directions[0]
    np.testing.assert_allclose(differences @ concept.vector, 0, atol=1e-9)
    assert np.linalg.norm(concept.vector) == pytest.approx(1)
    itself = Task(("f", "m"), np.stack([concept.vector, -concept.vector]), np.zeros(2), "made")
    with pytest.raises(InputError, match="asks for the concept itself"):
        concept.orthogonal_to(itself)


def test_zero_shot_classes_are_unit_means() -> None:
    vectors = {"a x": [3.0, 0], "a y": [0, 2.0], "a z": [0, -5.0]}

    def table(texts):
        return np.array([vectors[text] for text in texts])

    task = task_from_texts({"p": ["x", "y"], "q": ["z"]}, ["a {}"], table)
    np.testing.assert_allclose(task.directions, 100 * np.array([[0.5**0.5, 0.5**0.5], [0, -1]]))
    np.testing.assert_allclose(task.evidence(0), task.directions[0] - task.directions[1])
    with pytest.raises(InputError, match="at least two classes"):
        task_from_texts({"p": ["x"]}, ["a {}"], table)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "should hold templates"),
        ("colour: 1", "has 'colour'"),
        ("templates: []", "should be a list of words"),
        ("templates: [a]", "has no .* for the word"),
        ("classes: [a]", "classes should be"),
        ("concept: {name: x, poles: {a: {words: [b], levels: [c]}}}", "two poles"),
        ("a: [", "cannot be read as YAML"),
    ],
)
def test_broken_prompt_files(tmp_path, text, message) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        read_prompts(tmp_path / "p.yaml")


def test_prompts_of_a_user(tmp_path) -> None:
    poles = "{with: {words: [person with glasses], levels: [Eyeglasses]}, without: {words: [person], levels: [none]}}"
    (tmp_path / "own.yaml").write_text(
        f'concept: {{name: glasses, poles: {poles}}}\nclasses: {{"yes": [doctor], 1: [nurse]}}'
    )
    found = read_prompts(tmp_path / "own.yaml")
    assert [(pole.name, pole.levels) for pole in found.concept.poles] == [
        ("with", ("Eyeglasses",)),
        ("without", ("none",)),
    ]
    assert found.classes == {"yes": ("doctor",), "1": ("nurse",)}


def test_calibration_of_two_classes_is_a_quantile() -> None:
    rng = np.random.default_rng(0)
    output, labels = rng.normal(size=(400, 5)), (rng.random(400) < 0.15).astype(int)
    task = Task(("no", "yes"), rng.normal(size=(2, 5)), np.array([9.0, 0.0]), "prompts")
    assert task.logits(output).argmax(1).sum() == 0  # without it the second class is never chosen
    found = task.calibrated(output, labels).logits(output).argmax(1)
    margin = output @ (task.directions[1] - task.directions[0])
    assert set(np.flatnonzero(found)) == set(np.argsort(-margin)[: labels.sum()])


def test_calibration_of_many_classes_meets_their_shares() -> None:
    rng = np.random.default_rng(1)
    output, labels = rng.normal(size=(1000, 6)), rng.choice(5, 1000, p=[0.4, 0.3, 0.2, 0.1, 0.0])
    task = Task(tuple("abcde"), rng.normal(size=(5, 6)), rng.normal(size=5) * 3, "prompts")
    shifted = task.calibrated(output, labels)
    found = np.bincount(shifted.logits(output).argmax(1), minlength=5)
    assert np.abs(found - np.bincount(labels, minlength=5)).max() <= 3
    assert found[4] == 0  # a class that does not occur is not chosen
    plain, evidence = task.total(output, 1), shifted.total(output, 1)  # nor does it take the evidence for another away
    np.testing.assert_allclose(evidence - evidence.mean(), plain - plain.mean(), atol=1e-8)
