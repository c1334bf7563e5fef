"""`fairhead locate` and `fairhead ablate` on pairs of texts, through the real command."""

import csv
import json
import re

import numpy as np
import pytest
from made_language import PLANTED, planted_llama, tokenizer
from made_language import pairs as made

from fairhead.cli import main
from fairhead.data.sentences import GOLD_LABELS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("planted")
    planted_llama().save_pretrained(where)
    tokenizer().save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def crows(tmp_path_factory):
    file = tmp_path_factory.mktemp("crows") / "crows_pairs_anonymized.csv"
    with file.open("w", newline="") as handle:
        rows = csv.writer(handle)
        rows.writerow(["", "sent_more", "sent_less", "stereo_antistereo", "bias_type", "annotations"])
        for pair in made():
            rows.writerow([pair.id, pair.more, pair.less, pair.direction, pair.bias_type, "[['gender']]"])
    return file


@pytest.fixture(scope="module")
def stereoset(tmp_path_factory):
    file = tmp_path_factory.mktemp("stereoset") / "dev.json"
    items = []
    for pair in made(n=60):
        texts = (pair.more, pair.less, "are are the word1 word2 word3 the")
        sentences = [{"sentence": t, "gold_label": g} for t, g in zip(texts, GOLD_LABELS, strict=True)]
        items.append(
            {
                "id": pair.id,
                "target": f"term{int(pair.id) % 12}",
                "bias_type": pair.bias_type,
                "context": "the BLANK are",
                "sentences": sentences,
            }
        )
    file.write_text(json.dumps({"data": {"intrasentence": items}}))
    return file


@pytest.fixture(scope="module")
def located(folder, crows, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    main(["locate", "--model", str(folder), "--data", f"crows:{crows}", "--forward", "--n-boot", "200",
          "--features", str(out / "terms"), "--out", str(out)])  # fmt: skip
    return out


def test_locate_finds_the_planted_head_in_crows_pairs(located) -> None:
    content = json.loads((located / "headmap.json").read_text())
    assert content["selected"][0] == list(PLANTED)
    assert content["benchmark"] == "crows_pairs"
    assert {(e["kind"], e["way"]) for e in content["effects"]} == {
        ("mean", "direct"), ("zero", "direct"), ("mean", "forward"), ("zero", "forward"), ("resample", "forward"),
    }  # fmt: skip
    assert content["provenance"]["weights"]
    assert "L1H2" in (located / "report.html").read_text()


@pytest.mark.parametrize("gpu", [False, True])
def test_tf32_is_noted_where_there_is_any(folder, crows, capsys, monkeypatch, gpu) -> None:
    monkeypatch.setattr("fairhead.locate.pair_question.has_tf32", lambda device: gpu)
    options = ["--data", f"crows:{crows}", "--heads", "L1H2", "--draws", "3", "--n-boot", "100", "--json", "-"]
    main(["ablate", "--model", str(folder), *options, "--tf32"])
    noted = [note for note in json.loads(capsys.readouterr().out)["notes"] if "TF32" in note]
    assert len(noted) == gpu
    for note in noted:  # sums in another order, no more
        assert float(re.search(r"by (\S+) nats a pair on average", note)[1]) < 1e-4


def test_stereoset_has_lms_for_damage(folder, stereoset, capsys) -> None:
    main(["locate", "--model", str(folder), "--data", f"stereoset:{stereoset}", "--forward", "--rank", "effect",
          "--n-boot", "100", "--heads", "1", "--json", "-"])  # fmt: skip
    content = json.loads(capsys.readouterr().out)
    assert content["selected"] == [list(PLANTED)]
    forward = {m["metric"]: m for e in content["effects"] if e["way"] == "forward" for m in e["metrics"]}
    assert set(forward) == {"log_odds", "log_odds_size", "ss", "nll", "lms"}
    assert np.array(content["single_heads"]["values"]).shape == (3, 4)
    assert content["gap"]["clusters"] == 6, "half of the twelve terms"


def test_a_concept_takes_the_pairs_of_its_type(folder, crows, capsys) -> None:
    main(["locate", "--model", str(folder), "--data", f"crows:{crows}", "--concept", "gender", "--n-boot", "100",
          "--json", "-"])  # fmt: skip
    content = json.loads(capsys.readouterr().out)
    assert sum(content["n"].values()) == sum(pair.bias_type == "gender" for pair in made())
    assert content["selected"][0] == list(PLANTED)


@pytest.mark.parametrize("kind", ["zero", "mean"])
def test_ablate_saves_a_model_that_scores_what_was_reported(located, folder, crows, kind, capsys, tmp_path) -> None:
    arguments = ["--data", f"crows:{crows}", "--n-boot", "100", "--json", "-"]
    edit = ["--from", str(located / "headmap.json"), "--kind", kind]
    main(["ablate", "--model", str(folder), *arguments, *edit, "--save", str(tmp_path)])
    reported = json.loads(capsys.readouterr().out)
    forward = {m["metric"]: m for m in reported["effects"][-1]["metrics"]}
    assert reported["effects"][-1]["way"] == "forward"
    assert forward["log_odds"]["before"] > 5
    assert not any("chosen on other rows" in note for note in reported["notes"])
    assert f"# {folder.name} with {len(reported['selected'])} edited head" in (tmp_path / "README.md").read_text()
    main(["ablate", "--model", str(tmp_path), *arguments, "--heads", "L0H0", "--kind", "zero", "--draws", "2"])
    again = {m["metric"]: m for m in json.loads(capsys.readouterr().out)["effects"][-1]["metrics"]}
    # The pairs are the same half; of the saved model, "before" is what the edit was said to make of it.
    assert abs(again["log_odds"]["before"]) == pytest.approx(abs(forward["log_odds"]["after"]), abs=1e-4)
    assert again["nll"]["before"] == pytest.approx(forward["nll"]["after"], abs=1e-5)


def test_heads_that_are_named_are_not_said_to_be_chosen(located, folder, crows, capsys) -> None:
    ablate = ["ablate", "--model", str(folder), "--data", f"crows:{crows}", "--n-boot", "100", "--draws", "2"]
    main([*ablate, "--heads", "L1H2,L1H2"])  # named twice, it is one head
    shown = " ".join(capsys.readouterr().out.split())
    assert "L1H2 was named. It is significant on the reporting half." in shown
    assert "selected on one half" not in shown
    main([*ablate, "--from", str(located / "headmap.json"), "--seed", "1", "--json", "-"])
    assert any("chosen on other rows" in note for note in json.loads(capsys.readouterr().out)["notes"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["locate", "--task", "gender"], "--task does not apply to pairs of texts"),
        (["locate", "--class", "yes"], "--class does not apply to pairs of texts"),
        (["locate", "--batch-size", "8"], "--batch-size does not apply to pairs of texts"),
        (["ablate", "--heads", "L0H0", "--tokens", "first"], "--tokens does not apply to pairs of texts"),
        (["locate", "--concept", "gendre"], "Did you mean 'gender'?"),
        (["locate", "--data", "crows:"], "named as name:path"),
        (["locate", "--data", "crows:nowhere"], "nowhere"),
        (["locate", "--model", "nowhere"], "a folder with a model"),
        (["locate", "--rank", "bias"], "it is gap or effect"),
        (["locate", "--limit", "2"], "at least 4 are needed"),
        (["ablate", "--heads", "L9H0"], "the model has 3 layers of 4 heads"),
        (["ablate", "--heads", "L0H0", "--kind", "project"], "a projection needs two groups"),
    ],
)
def test_mistakes_get_one_line(folder, crows, capsys, arguments, message) -> None:
    given = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    flags = [part for pair in {"--model": str(folder), "--data": f"crows:{crows}", **given}.items() for part in pair]
    with pytest.raises(SystemExit) as left:
        main([arguments[0], *flags])
    assert left.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1]
    assert lines[-1].startswith("fairhead: error:")
