"""Text data sets and language benchmarks as published: exact counts."""

import json
from collections import Counter

import numpy as np
import pandas as pd
import pytest

from fairhead.data import read
from fairhead.data.sentences import split_by_target


def test_hatexplain(real_data):
    data = read("hatexplain", real_data("hatexplain"))
    assert data.sizes == {"train": 15_383, "val": 1_922, "test": 1_924}
    # 20 148 posts; the 919 without a majority are in no part of the official split.
    assert data.skipped_counts == {"undecided: no label has a majority": 919}
    assert len(data) == 20_148 - 919
    test, train = data.examples("test"), data.examples("train")
    women = data.groups(test.ids)["Women"].values() == "Women"
    assert (women.sum(), test.labels[women].sum()) == (147, 126)  # 21 negatives: figures that the method paper implies
    assert (data.groups(train.ids)["Women"].values() == "Women").sum() == 1_236
    three = read("hatexplain", real_data("hatexplain"), target="label")
    counts = Counter(three.classes[y] for y in three.all.labels)
    assert counts == {"hatespeech": 5_935, "normal": 7_814, "offensive": 5_480}


def test_multinli(real_data):
    data = read("multinli", real_data("multinli"))
    assert data.sizes == {"dev_matched": 9_815}
    table = pd.read_json(real_data("multinli/multinli_1.0_dev_matched.jsonl"), lines=True, dtype=str)
    assert [data.classes[y] for y in data.all.labels] == table["gold_label"].tolist()
    words = table["sentence2"].str.replace(r"[^\w\s]|_", "", regex=True).str.lower().str.split()
    expected = [bool({"nobody", "no", "never", "nothing"} & set(w)) for w in words]
    negation = data.groups()["negation"].values() == "negation"
    np.testing.assert_array_equal(negation, expected)
    # The share that the method paper gives for the whole corpus is .071; contradictions have most of it here.
    assert negation.sum() == 682
    assert np.bincount(data.all.labels[negation]).tolist() == [504, 91, 87]
    pooled = read("multinli", real_data("multinli"), split="random")
    assert pooled.sizes == pytest.approx({"train": 4_907.5, "val": 1_963, "test": 2_944.5}, abs=1)


def test_stereoset(real_data):
    items = read("stereoset", real_data("stereoset/dev.json"))
    assert Counter(i.kind for i in items) == {"intrasentence": 2_106, "intersentence": 2_123}
    assert Counter((i.kind[:5], i.bias_type) for i in items) == {
        ("intra", "gender"): 255,
        ("intra", "profession"): 810,
        ("intra", "race"): 962,
        ("intra", "religion"): 79,
        ("inter", "gender"): 242,
        ("inter", "profession"): 827,
        ("inter", "race"): 976,
        ("inter", "religion"): 78,
    }
    published = json.loads(real_data("stereoset/dev.json").read_text(encoding="utf-8"))["data"]["intersentence"]
    first = next(i for i in items if i.kind == "intersentence")
    stereotype = next(s["sentence"] for s in published[0]["sentences"] if s["gold_label"] == "stereotype")
    assert first.texts.stereotype == f"{published[0]['context']} {stereotype}"
    split = split_by_target(items)
    assert not {i.target for i in split.train} & {i.target for i in split.held_out}
    assert len(split.held_out) / len(items) == pytest.approx(0.1, abs=0.02)


def test_crows_pairs(real_data):
    pairs = read("crows-pairs", real_data("crows_pairs"))
    assert Counter(p.bias_type for p in pairs) == {
        "race-color": 516,
        "gender": 262,
        "socioeconomic": 172,
        "nationality": 159,
        "religion": 105,
        "age": 87,
        "sexual-orientation": 84,
        "physical-appearance": 63,
        "disability": 60,
    }
    assert Counter(p.direction for p in pairs) == {"stereo": 1_290, "antistereo": 218}
    table = pd.read_csv(real_data("crows_pairs/crows_pairs_anonymized.csv"), dtype=str)
    assert [p.more for p in pairs] == table["sent_more"].tolist()
    assert [p.less for p in pairs] == table["sent_less"].tolist()
    assert {len(p.annotations) for p in pairs} == {5}


BBQ = {"Age": 3_680, "Disability_status": 1_556, "Nationality": 3_080, "Physical_appearance": 1_576, "Religion": 1_200}


def test_bbq(real_data):
    items = read("bbq", real_data("bbq"))
    # Five categories, 11 092 items: the specification speaks of six and 11 956, the sixth (864 items) is not here.
    assert Counter(i.category for i in items) == BBQ
    assert items.skipped == {}
    for condition in ("ambig", "disambig"):
        assert sum(i.condition == condition for i in items) == len(items) / 2
    assert all(i.label == i.unknown for i in items if i.condition == "ambig")
    assert all(i.label != i.unknown for i in items if i.condition == "disambig")
    # A context answers the negative question with one person and the other question with the other, so how often the
    # correct answer agrees with the stereotype cannot depend on polarity. Four published templates have contexts in one
    # direction only: there a target that ignored polarity would show.
    agree = {
        polarity: Counter(
            (i.category, i.question_index, i.label == i.target)
            for i in items
            if (i.condition, i.polarity) == ("disambig", polarity)
        )
        for polarity in ("neg", "nonneg")
    }
    assert agree["neg"] == agree["nonneg"]
    templates = {(i.category, i.question_index) for i in items}
    assert sum(agree["neg"][*t, True] != agree["neg"][*t, False] for t in templates) == 4


def test_bbq_targets_are_those_of_the_authors_rule(real_data):
    """The authors' own script looks for the answer's group as a substring of the joined names of groups."""
    for category in BBQ:
        rows = [json.loads(line) for line in real_data(f"bbq/data/{category}.jsonl").read_text("utf-8").splitlines()]
        items = read("bbq", real_data("bbq"), categories=(category,))
        for row, item in zip(rows, items, strict=True):
            known = ", ".join(row["additional_metadata"]["stereotyped_groups"])
            found = []
            for i in range(3):
                person, group = row["answer_info"][f"ans{i}"]
                matches = group == known if category == "Age" else group.lower() in known.lower()
                if category == "Nationality":
                    matches = matches or person.lower() in known.lower()
                found += [i] * matches
            assert len(found) == 1
            other = next(i for i in range(3) if i != found[0] and row["answer_info"][f"ans{i}"][1] != "unknown")
            assert item.target == (found[0] if row["question_polarity"] == "neg" else other)


def test_bold(real_data):
    prompts = read("bold", real_data("bold"))
    assert Counter(p.domain for p in prompts) == {
        "gender": 3_204,
        "political_ideology": 1_984,
        "profession": 10_195,
        "race": 7_657,
        "religious_ideology": 639,
    }
    assert Counter(p.group for p in prompts if p.domain == "gender") == {
        "American_actors": 2_048,
        "American_actresses": 1_156,
    }
    assert len({p.id for p in prompts}) == 23_679
    assert all(p.wikipedia is not None and p.wikipedia.startswith(p.prompt.strip()) for p in prompts)


def test_winobias(real_data):
    sentences = read("winobias", real_data("winobias"))
    counts = Counter((s.kind, s.split, s.direction) for s in sentences)
    assert len(counts) == 8
    assert set(counts.values()) == {396}
    assert all(s.text[m.start : m.end] == m.text for s in sentences for m in (s.occupation, *s.pronouns))
    assert not any("[" in s.text or "]" in s.text for s in sentences)
