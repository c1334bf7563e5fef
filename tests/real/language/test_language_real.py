"""The scoring engine and the benchmarks on published data and pretrained weights."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fairhead.cli import main  # noqa: E402
from fairhead.data import read  # noqa: E402
from fairhead.language import Request, load_scorer  # noqa: E402
from fairhead.language.benchmarks import benchmark_named  # noqa: E402
from fairhead.language.benchmarks.perplexity import Document  # noqa: E402
from fairhead.language.running import run_benchmark  # noqa: E402

TOPICS = ("stereoset", "crows_pairs", "bbq", "winobias")


@pytest.fixture(scope="module")
def tinystories(real_model):
    return load_scorer(real_model("tinystories-15m"), device="cpu")


def one_by_one(scorer, request):
    """Sum over the continuation by a plain forward pass, in float64 from the logits on."""
    prefix = request.prefix.rstrip()
    text = request.prefix + request.continuation
    whole = scorer.tokenizer(text, add_special_tokens=False)["input_ids"]
    before = scorer.tokenizer(prefix, add_special_tokens=False)["input_ids"] if prefix else []
    ids = torch.tensor([[scorer.tokenizer.bos_token_id, *whole]])
    with torch.no_grad():
        logits = scorer.model(ids).logits[0, len(before) : -1].double()
    return float(logits.log_softmax(-1).gather(1, ids[0, len(before) + 1 :, None]).sum())


def requests_of(name, real_data, n):
    benchmark = benchmark_named(name)
    items = benchmark.sample(read(name, real_data(name)), n, seed=0)
    return benchmark.requests(items, benchmark.options())


@pytest.mark.parametrize("name", TOPICS)
def test_sums_equal_one_by_one_scoring(name, tinystories, real_data):
    requests = requests_of(name, real_data, 12)
    scores = tinystories.score(requests)
    assert tinystories.reads_trees
    found = np.array([scores[r.id].logprob for r in requests])
    assert found == pytest.approx(np.array([one_by_one(tinystories, r) for r in requests]), abs=1e-4)


@pytest.mark.parametrize("name", ["stereoset", "bbq"])
def test_sums_equal_one_by_one_scoring_on_a_larger_model(name, real_model, real_data):
    scorer = load_scorer(real_model("smollm2-135m"), device="cpu")
    requests = requests_of(name, real_data, 3)
    scores = scorer.score(requests)
    found = np.array([scores[r.id].logprob for r in requests])
    assert found == pytest.approx(np.array([one_by_one(scorer, r) for r in requests]), abs=1e-4)


def test_texts_beyond_the_context_are_left_out_by_name(tinystories):
    result = tinystories.score([Request("long", "", "once upon a time " * 100)], on_long="skip")
    assert result.too_long == ("long",)


# Ten documents, as an interval needs.
NAMES = ("Lily", "Anna", "Tom", "Ben", "Sara", "Mia", "Max", "Tim", "Sue", "Jack")


def test_perplexity_tells_stories_from_shuffled_words(tinystories):
    story = (
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
        "One day, she saw a big red ball. She wanted to play with it, but it was too high in a tree."
    )
    words = story.split()
    shuffled = " ".join(np.random.default_rng(0).permutation(words))
    plain, mixed = (
        run_benchmark("perplexity", tinystories, [Document(name, text.replace("Lily", name)) for name in NAMES])
        for text in (story, shuffled)
    )
    plain, mixed = plain["perplexity"], mixed["perplexity"]
    assert plain.value < 10 < 100 < mixed.value


def test_the_command_prints_a_result_and_goes_on_from_its_own_scores(real_model, real_data, tmp_path, capsys):
    arguments = ["lm", "crows", "--model", str(real_model("tinystories-15m")), "--data", str(real_data("crows_pairs"))]
    arguments += ["--limit", "40", "--device", "cpu", "--out", str(tmp_path / "scores"), "--json"]
    main([*arguments, str(tmp_path / "first.json")])
    shown = capsys.readouterr().out
    assert "on CrowS-Pairs: 40 items" in shown
    (journal,) = (tmp_path / "scores" / "journals").glob("crows_pairs-*.jsonl")
    assert len(journal.read_text().splitlines()) == 81
    before = journal.stat().st_mtime_ns
    main([*arguments, "-"])
    again = json.loads(capsys.readouterr().out)
    assert journal.stat().st_mtime_ns == before  # nothing was computed again
    assert again["estimates"] == json.loads((tmp_path / "first.json").read_text())["estimates"]
    assert again["provenance"]["start_token"] == "<s> (bos)"
    assert {"ss", "ss_per_token", "mean_abs_difference"} <= {e["metric"] for e in again["estimates"]}


def test_an_encoder_is_refused_in_one_line(real_model, real_data, capsys):
    model, data = str(real_model("minilm-l6")), str(real_data("crows_pairs"))
    with pytest.raises(SystemExit) as stopped:
        main(["lm", "crows", "--model", model, "--data", data])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "holds a BertModel; expected a causal language model" in error


@pytest.mark.slow
def test_smollm2_scores_as_an_independent_run_did(real_model, real_data):
    """Figures of a brute-force run with other code: `percent` as they were noted down, to the last digit."""
    scorer = load_scorer(real_model("smollm2-135m"), device="cpu", dtype="float32")
    crows = run_benchmark("crows_pairs", scorer, read("crows_pairs", real_data("crows_pairs")))
    assert 100 * crows["ss"].value == pytest.approx(55.6, abs=0.05)
    assert 100 * crows["ss_per_token"].value == pytest.approx(55.8, abs=0.05)
    items = [item for item in read("stereoset", real_data("stereoset")) if item.kind == "intrasentence"]
    result = run_benchmark("stereoset", scorer, items)
    expected = {
        None: (62.18, 89.44, 67.65),
        "gender": (60.49, 92.21, 72.87),
        "profession": (60.70, 90.16, 70.87),
        "race": (64.60, 88.04, 62.33),
    }
    for group, figures in expected.items():
        found = [100 * result[metric, group].value for metric in ("ss", "lms", "icat")]
        assert found == pytest.approx(figures, abs=0.005)
    assert result["ss", "religion"].value is None  # of three terms
