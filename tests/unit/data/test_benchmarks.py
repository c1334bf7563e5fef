"""Language benchmarks in small: formats, derived targets and what is broken."""

import json
from pathlib import Path
from typing import Any

import pytest

from fairhead.data import read
from fairhead.data.sentences import Answer, StereoSetItem, Triplet, derive_target, split_by_target
from fairhead.errors import InputError


def _stereoset(target: str = "t") -> dict[str, Any]:
    # Published orders differ from item to item.
    sentences = [{"sentence": f"It is {g}.", "gold_label": g} for g in ("unrelated", "stereotype", "anti-stereotype")]
    return {"id": f"id-{target}", "target": target, "bias_type": "race", "context": "See.", "sentences": sentences}


def test_stereoset_sorts_sentences_by_gold_label(tmp_path):
    data = {"intrasentence": [_stereoset("a")], "intersentence": [_stereoset("b")]}
    (tmp_path / "dev.json").write_text(json.dumps({"version": "1.1", "data": data}))
    intra, inter = read("stereoset", tmp_path)
    assert intra.texts == Triplet("It is stereotype.", "It is anti-stereotype.", "It is unrelated.")
    assert inter.texts.anti_stereotype == "See. It is anti-stereotype."
    assert (intra.kind, inter.kind) == ("intrasentence", "intersentence")


def test_stereoset_items_must_have_one_sentence_of_each_label(tmp_path):
    wrong = _stereoset("wrong")
    wrong["sentences"][0]["gold_label"] = "stereotype"
    (tmp_path / "dev.json").write_text(json.dumps({"data": {"intersentence": [wrong, _stereoset(), 3]}}))
    with pytest.raises(InputError) as told:
        read("stereoset", tmp_path)
    assert str(told.value) == (
        f"{tmp_path}/dev.json: id-wrong is not as published: the gold labels of its sentences are stereotype, "
        "stereotype, anti-stereotype; expected one each of stereotype, anti-stereotype, unrelated: mend or remove it, "
        "or go on without it (--data-option on_error=skip; in Python on_error='skip')"
    )
    items = read("stereoset", tmp_path, on_error="skip")
    assert items.skipped == {"not as published": ("id-wrong", "intersentence 2")}
    (tmp_path / "dev.json").write_text(json.dumps({"data": {"intersentence": [{"id": "bare"}]}}))
    with pytest.raises(InputError, match="bare is not as published: it has no 'sentences': mend or remove it"):
        read("stereoset", tmp_path)
    (tmp_path / "dev.json").write_text("{}")
    with pytest.raises(InputError, match=r"StereoSet has lists data\.intrasentence"):
        read("stereoset", tmp_path)
    (tmp_path / "own.csv").write_text("stereotype,antistereotype,unrelated\na,b,c\n")
    with pytest.raises(InputError, match=r"own.csv: StereoSet is JSON; --data triplets:FILE reads a table of"):
        read("stereoset", tmp_path / "own.csv")
    assert len(read("triplets", tmp_path / "own.csv")) == 1
    (tmp_path / "dev.json").write_text('{"data": {"intersentence": []}}')
    with pytest.raises(
        InputError, match=f"{tmp_path}: stereoset has no item here; left out: nothing, the files are empty"
    ):
        read("stereoset", tmp_path)


def test_stereoset_split_keeps_spellings_of_a_term_together():
    nothing = Triplet("", "", "")
    items = [
        StereoSetItem(f"{t}{i}", "intrasentence", t, "race", "", nothing)
        for i in range(50)
        for t in ("Iran", "iran", f"other {i}")
    ]
    for seed in range(10):
        split = split_by_target(items, held_out=0.2, seed=seed)
        assert len(split.train) + len(split.held_out) == 150
        terms = [{item.target.lower() for item in part} for part in split]
        assert not terms[0] & terms[1]


CROWS = ",sent_more,sent_less,stereo_antistereo,bias_type,annotations,anon_writer,anon_annotators\r\n"


def test_sentences_that_say_the_same_of_different_groups_are_held_out_together():
    triplets = [Triplet(f"{a} cannot {verb}.", f"{b} cannot {verb}.", "") for verb in ("drive", "sing", "cook", "swim")
                for a, b in (("She", "He"), ("Dee", "Al"))]  # fmt: skip
    items = [StereoSetItem(str(i), "intrasentence", of[0], "gender", "", of) for i, of in enumerate(triplets)]
    for seed in range(5):
        split = split_by_target(items, held_out=0.25, seed=seed)
        assert [len(split.train), len(split.held_out)] == [6, 2]
        assert len({item.sentences.stereotype.split()[-1] for item in split.held_out}) == 1


def test_crows_pairs_with_quotes_commas_and_line_breaks(tmp_path):
    sentences = '"She said ""no"", and\nleft.","He said ""no"", and\nleft."'
    row = f"7,{sentences},antistereo,gender,\"[['gender'], []]\",a1,\"['a2']\"\r\n"
    (tmp_path / "crows_pairs_anonymized.csv").write_bytes((CROWS + row).encode())
    (pair,) = read("crows-pairs", tmp_path)
    assert pair.more == 'She said "no", and\nleft.'
    assert (pair.direction, pair.less) == ("antistereo", 'He said "no", and\nleft.')
    assert (pair.id, pair.bias_type, pair.annotations) == ("7", "gender", (("gender",), ()))


def test_crows_pairs_bad_rows_are_named(tmp_path):
    file = tmp_path / "crows_pairs_anonymized.csv"
    good = "0,a,b,stereo,age,[],a1,[]\r\n"
    file.write_text(CROWS + good + "1,a,b,both,age,[],a1,[]\r\n")
    with pytest.raises(InputError, match=r"anonymized\.csv: line 3 is not as published: .*'both'"):
        read("crows_pairs", file)
    assert read("crows_pairs", file, on_error="skip").skipped == {"not as published": ("line 3",)}
    file.write_text(CROWS + good + '2,"a cut off sen')
    with pytest.raises(InputError, match=r"after line 2: .*Is the file cut off"):
        read("crows_pairs", file)
    file.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="has no column 'sent_more'; it has a, b"):
        read("crows_pairs", file)
    # As French CrowS-Pairs is published
    file.write_text("\tsent_more\tsent_less\tstereo_antistereo\tbias_type\n0\ta\tb\tstereo\tage\n")
    with pytest.raises(
        InputError, match=r"bias_type, parted by tabs instead of commas\. If .*--data pairs:FILE reads it"
    ):
        read("crows_pairs", file)
    assert read("pairs", file)[0].more == "a"
    file.write_text('{"version":"1.1","data":{}}')  # another benchmark's file
    with pytest.raises(InputError, match="Is the file cut off"):
        read("crows_pairs", file)
    file.write_text(", ".join(["word"] * 10_000))
    with pytest.raises(InputError, match=r"it has word,.* \.\.\.\. If"):
        read("crows_pairs", file)


UNKNOWN = Answer("Not known", "Not known", "unknown")


@pytest.mark.parametrize(
    ("category", "answers", "stereotyped", "neg", "nonneg"),
    [
        ("Age", [("x", "nonOld"), ("y", "old")], ["old"], 1, 0),  # "old" is part of "nonOld"
        ("Age", [("x", "old"), ("y", "nonOld")], ["nonOld"], 1, 0),
        ("Nationality", [("Afghan", "MiddleEast"), ("French", "Europe")], ["Afghan", "Syrian"], 0, 1),  # by person
        (
            "Race_ethnicity",
            [("African", "African"), ("African American", "African American")],
            ["African American"],
            1,
            0,
        ),
        ("Race_ethnicity", [("Jamal Smith", "M-Black"), ("Ben Smith", "M-White")], ["Black"], 0, 1),
        ("Gender_identity", [("Mary", "F"), ("John", "M")], ["F"], 0, 1),
        ("Gender_identity", [("boy", "boy"), ("girl", "girl")], ["M"], 0, 1),
        ("Gender_identity", [("Bo", "nonTrans"), ("Al", "trans_F")], ["Transgender women", "trans"], 1, 0),
        ("SES", [("wealthy", "highSES"), ("poor", "lowSES")], ["low SES"], 1, 0),
        ("Disability_status", [("x", "nonDisabled"), ("y", "disabled")], ["disabled", "autistic people"], 1, 0),
    ],
)
def test_bbq_targets(category, answers, stereotyped, neg, nonneg):
    three = [*(Answer(f"The {person}", person, group) for person, group in answers), UNKNOWN]
    assert derive_target(category, "neg", three, stereotyped) == (neg, None)
    assert derive_target(category, "nonneg", three, stereotyped) == (nonneg, None)
    # The place of the unknown answer does not matter.
    turned = [UNKNOWN, *three[:2]]
    assert derive_target(category, "neg", turned, stereotyped) == (neg + 1, None)


def _bbq(example: int, groups: list[str], category: str = "Religion", **changes: Any) -> dict[str, Any]:
    row = {
        "example_id": example,
        "question_index": "3",
        "question_polarity": "neg",
        "context_condition": "ambig",
        "category": category,
        "answer_info": {"ans0": ["Jewish", "Jewish"], "ans1": ["Not known", "unknown"], "ans2": ["Muslim", "Muslim"]},
        "additional_metadata": {"subcategory": "None", "stereotyped_groups": groups, "version": "a", "source": ""},
        "context": "Two people met.",
        "question": "Who?",
        "ans0": "The Jewish one",
        "ans1": "Not known",
        "ans2": "The Muslim one",
        "label": 1,
    }
    return row | changes


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows))


def test_bbq_drops_and_counts_items_without_a_target(tmp_path):
    _write(tmp_path / "data/Religion.jsonl", [_bbq(0, ["Muslim"]), _bbq(1, ["Muslim", "Jewish"]), _bbq(2, ["Hindu"])])
    _write(tmp_path / "data/Race_x_SES.jsonl", [_bbq(0, ["Muslim"], "Race_x_SES")])
    _write(tmp_path / "results/preds.jsonl", [{"not": "an item"}])
    items = read("bbq", tmp_path)
    assert [(i.id, i.target, i.unknown) for i in items] == [("Religion/0", 2, 1)]
    assert items.skipped == {
        "intersectional: the target is only in additional_metadata.csv": ("Race_x_SES/0",),
        "both answers match the stereotyped groups": ("Religion/1",),
        "no answer matches the stereotyped groups": ("Religion/2",),
    }
    everything = read("bbq", tmp_path, drop_without_target=False, categories=("Religion",))
    assert [i.target for i in everything] == [2, None, None]
    with pytest.raises(InputError, match="no category 'Age'; there are Race_x_SES, Religion"):
        read("bbq", tmp_path, categories=("Age",))


def test_bbq_takes_the_authors_targets_where_they_are_at_hand(tmp_path):
    _write(tmp_path / "data/Religion.jsonl", [_bbq(0, ["Muslim"]), _bbq(1, ["Muslim"])])
    _write(tmp_path / "data/Race_x_SES.jsonl", [_bbq(0, ["Black"], "Race_x_SES"), _bbq(1, ["Black"], "Race_x_SES")])
    csv = '"category","question_index","example_id","target_loc","label_type"\n'
    csv += '"Religion","3",0,0,"label"\n"Religion","3",1,NA,"label"\n'
    csv += '"Race_x_SES","3",0,"2","label"\n"Race_x_SES","3",1,"x","label"\n'
    metadata = tmp_path / "elsewhere" / "additional_metadata.csv"
    metadata.parent.mkdir()
    metadata.write_text(csv)
    items = read("bbq", tmp_path / "data", metadata=metadata)
    assert [(i.id, i.target) for i in items] == [("Race_x_SES/0", 2), ("Religion/0", 0)]
    assert items.skipped_counts == {"no target in additional_metadata.csv": 2}
    assert [i.target for i in read("bbq", tmp_path)] == [2, 0]  # found in the folder itself
    metadata.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match=r"is not the authors' additional_metadata\.csv"):
        read("bbq", tmp_path)


@pytest.mark.parametrize(
    "changes", [{"label": 3}, {"question_polarity": "bad"}, {"answer_info": {}}, {"context_condition": None}]
)
def test_bbq_bad_items_are_named(tmp_path, changes):
    _write(tmp_path / "Religion.jsonl", [_bbq(0, ["Muslim"]), _bbq(1, ["Muslim"], **changes)])
    with pytest.raises(InputError, match=r"Religion\.jsonl: line 2 is not as published"):
        read("bbq", tmp_path / "Religion.jsonl")
    assert len(read("bbq", tmp_path / "Religion.jsonl", on_error="skip")) == 1


def test_bold_pairs_prompts_with_their_sentences(tmp_path):
    for name, text in (("prompt", "He is "), ("wiki", "He is here.")):
        folder = tmp_path / ("prompts" if name == "prompt" else "wikipedia")
        folder.mkdir()
        content = {"American_actors": {"A_B": [text, text]}}
        (folder / f"gender_{name}.json").write_text(json.dumps(content))
    prompts = read("bold", tmp_path)
    assert [(p.id, p.prompt, p.wikipedia) for p in prompts] == [
        ("gender/American_actors/A_B/0", "He is ", "He is here."),
        ("gender/American_actors/A_B/1", "He is ", "He is here."),
    ]
    assert read("bold", tmp_path / "prompts")[0].wikipedia is None
    (tmp_path / "wikipedia/gender_wiki.json").write_text('{"American_actors": {"A_B": ["He is here."]}}')
    with pytest.raises(InputError, match=r"gender/American_actors/A_B is not as published: .*2 prompts but 1"):
        read("bold", tmp_path)
    with pytest.raises(InputError, match="no domain 'race'; there are gender"):
        read("bold", tmp_path, domains=("race",))
    (tmp_path / "prompts/gender_prompt.json").write_text('["He is "]')
    with pytest.raises(InputError, match=r"gender_prompt\.json: BOLD has"):
        read("bold", tmp_path)


def test_bold_goes_on_without_a_domain_whose_file_is_cut_off(tmp_path):
    whole = json.dumps({"American_actors": {"A_B": ["He is "]}})
    (tmp_path / "gender_prompt.json").write_text(whole)
    (tmp_path / "race_prompt.json").write_text(whole[:-5])
    with pytest.raises(InputError, match=r"race_prompt\.json: is not complete JSON"):
        read("bold", tmp_path)
    found = read("bold", tmp_path, on_error="skip")
    assert [prompt.domain for prompt in found] == ["gender"]
    assert found.skipped == {"a file that cannot be read": ("race",)}


def test_winobias_marks_occupation_and_pronouns(tmp_path):
    file = tmp_path / "pro_stereotyped_type2.txt.test"
    file.write_text("1 The clerk told [the CEO] that [he] lost [his] key.\n2 The clerk told the CEO [his] name.\n")
    with pytest.raises(InputError, match=r"type2\.txt\.test, line 2: needs a number, one occupation"):
        read("winobias", tmp_path)
    (sentence,) = read("winobias", tmp_path, on_error="skip")
    assert sentence.text == "The clerk told the CEO that he lost his key."
    for mention in (sentence.occupation, *sentence.pronouns):
        assert sentence.text[mention.start : mention.end] == mention.text
    assert [m.text for m in (sentence.occupation, *sentence.pronouns)] == ["the CEO", "he", "his"]
    assert (sentence.id, sentence.kind, sentence.split, sentence.direction) == ("type2/test/1/pro", 2, "test", "pro")
