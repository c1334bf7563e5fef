"""Training on several sources of sentences at once: each keeps its own share out, and has its own mean taken off."""

import csv
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from language_models import ITEMS, build, saved, tokenizer, write_stereoset
from scipy.stats import binomtest, ttest_1samp

import fairhead
from fairhead.cli import main
from fairhead.data import dataset, read_items
from fairhead.data.sentences import GOLD_LABELS, CrowsPair, Triplet, read_bbq
from fairhead.errors import InputError
from fairhead.language.answers import Score
from fairhead.language.benchmarks import bbq as bbq_benchmark
from fairhead.language.benchmarks import benchmark_of
from fairhead.language.item_table import read_items as read_table
from fairhead.language.running import TrainingRecord, read_data, without_training_targets
from fairhead.language.scorer import Scorer
from fairhead.mitigate.balance_pairs import BalancePairs
from fairhead.mitigate.language_trainer import LanguageTrainer, scores_of, set_aside
from fairhead.mitigate.sentence_losses import _clearest, _scores
from fairhead.mitigate.triplets import TripletData, swapped_people, targets, texts_of
from fairhead.train import LanguagePlan
from fairhead.train.step import say_once

WHO = ("nurse", "baker", "pilot", "poet", "people", "money", "stone", "home")
SAYS = ("was kind", "was very rude", "was always late", "was never late", "was careful with money", "went home")


def run(*arguments):
    main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """StereoSet, and 24 pairs as CrowS-Pairs has them: six sentences, each about four pairs of groups."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("stereoset", "crows_pairs"):
        (folder / name).mkdir()
    write_stereoset(folder / "stereoset/dev.json")
    with (folder / "crows_pairs/crows_pairs_anonymized.csv").open("w", newline="") as handle:
        table = csv.writer(handle)
        table.writerow(["", "sent_more", "sent_less", "stereo_antistereo", "bias_type", "annotations"])
        pairs = [(f"the {WHO[2 * k]} {said} .", f"the {WHO[2 * k + 1]} {said} .") for said in SAYS for k in range(4)]
        for i, (more, less) in enumerate(pairs):
            table.writerow([i, more, less, "stereo", ("age", "gender")[i % 2], "[]"])
    return folder


@pytest.fixture(scope="module")
def both(sources):
    return [f"stereoset:{sources / 'stereoset'}", f"crows:{sources / 'crows_pairs'}"]


def test_each_source_is_split_as_it_is_alone(both):
    split = TripletData(both, held_out=(0.25, 0.5)).read()
    for source, share in zip(both, (0.25, 0.5), strict=True):
        alone = TripletData(source, held_out=share).read()
        assert alone.held_out
        for together, part in zip(split, alone, strict=True):
            found = [one for one in together if one.source == source]
            assert [one.texts for one in found] == [one.texts for one in part]
            assert [one.id for one in found] == [f"{source}/{one.id}" for one in part]
    assert len(split.train) + len(split.held_out) == len(ITEMS) + 24
    said = [{one.target.split(maxsplit=2)[2] for one in part if one.source == both[1]} for part in split]
    assert len(said[0]) == len(said[1]) == 3
    assert not said[0] & said[1], "a sentence about one group is trained on, and held out about another"


def test_a_term_held_out_of_one_source_is_trained_on_in_none(both, tmp_path):
    held_out = TripletData(both[0], held_out=0.25).read().held_out[0]
    file = tmp_path / "own.csv"
    file.write_text(
        f"stereotype,anti_stereotype,unrelated,term\nA b.,A c.,D.,{held_out.target.upper()}\nE f.,E g.,H.,x\n"
    )
    split = TripletData([both[0], f"triplets:{file}"], held_out=(0.25, 0)).read()
    assert [one.target for one in split.train if one.source != both[0]] == ["x"]


def test_a_column_may_be_of_one_source_alone(tmp_path):
    (tmp_path / "pairs.csv").write_text("more,less,who\nA b.,A c.,x\nD e.,D f.,y\n")
    (tmp_path / "threes.csv").write_text("stereotype,anti_stereotype,unrelated,job\nG h.,G i.,J.,z\n")
    specs = [f"pairs:{tmp_path / 'pairs.csv'}", f"triplets:{tmp_path / 'threes.csv'}"]
    items = TripletData(specs, held_out=0, options={"pairs.term": "who", "triplets.term": "job"}).read().train
    assert [item.target for item in items] == ["x", "y", "z"]


def test_means_are_those_of_each_source(both):
    items = [*TripletData(both, held_out=0).read().train]
    method, model = BalancePairs(), build("llama")
    examples = method.refer(model, method.prepare(items, tokenizer(), 64)).examples
    for source in both:
        own = [e.reference for e, item in zip(examples, items, strict=True) if item.source == source]
        gaps = [reference.logprobs[0] - reference.logprobs[1] for reference in own]
        assert [reference.mean_gap for reference in own] == pytest.approx([np.mean(gaps)] * len(own))


@pytest.mark.parametrize(
    ("likelier", "seen"), [((32, 12), 0.8), ((24, 4), 0.1), ((12, 20), 0.3), ((36,), 0.9), ((20, 20), 0.5)]
)
def test_no_source_hides_what_becomes_of_another(likelier, seen):
    """Of 40 terms a source so many prefer the stereotype: by the mean of 32 and 12 the model would be near even."""
    items, scores = scored(*((40, n) for n in likelier))
    score = scores_of(SimpleNamespace(score=lambda requests, on_long: {r.id: scores[r.id] for r in requests}))
    assert score(items) == pytest.approx(seen)
    assert score(items[::-1]) == score(items)


@pytest.mark.parametrize(
    ("likelier", "seen"),
    [
        ((32, 12), 0.8),  # the mean would be near even
        ((12, 20, 26), 0.3),
        ((25, 15), 0.5),  # as far off as chance explains: the score of all speaks
        ((26, 26), 0.65),  # all of them are more clearly off than either
        ((9, 10, 11, 10), 0.25),
    ],
)
def test_no_category_hides_what_becomes_of_another(likelier, seen):
    """Of 40 terms a category so many prefer the stereotype, all of one source."""
    items, scores = scored(*((40, n) for n in likelier))
    of_one = [replace(item, source="", bias_type=item.source) for item in items]
    score = scores_of(SimpleNamespace(score=lambda requests, on_long: scores))
    assert score(of_one) == pytest.approx(seen)
    assert score(of_one[::-1]) == score(of_one)


def test_categories_of_an_even_model_seldom_speak():
    """Each of ten has 40 terms; by intervals of 95 % one of them would be clearly off even in a third of all draws."""
    rng, spoke = np.random.default_rng(0), 0
    items, scores = scored(*[(40, 0)] * 10)
    of_one = [replace(item, source="", bias_type=item.source) for item in items]
    for _ in range(100):
        likelier = rng.random(len(items)) < 0.5
        for item, yes in zip(items, likelier, strict=True):
            scores[f"{item.kind}/{item.id}/stereotype"] = Score("", -0.5 if yes else -1.5, 1)
        found = clearest_of(of_one, scores)[0]
        spoke += found != pytest.approx(likelier.mean())
    assert spoke <= 15


def clearest(*sources):
    """Score and chance of sources of so many terms, of which so many prefer the stereotype."""
    items, scores = scored(*sources)
    return clearest_of(items, scores)


def clearest_of(items, scores):
    found = _clearest(_scores(SimpleNamespace(score=lambda requests, on_long: scores), items))
    return found.ss, found.chance


def scored(*sources):
    items, scores, values = [], {}, ((-1.5, -2.0, -3.0), (-1.5, -1.0, -3.0))
    for source, (terms, likelier) in enumerate(sources):
        for i in range(terms):
            one = replace(ITEMS[0], id=f"{source}-{i}", target=f"{source}-{i}", source=str(source))
            items.append(one)
            for label, value in zip(GOLD_LABELS, values[i >= likelier], strict=True):
                scores[f"{one.kind}/{one.id}/{label}"] = Score("", value, 1)
    return items, scores


@pytest.mark.parametrize(
    ("terms", "likelier", "clear"),
    [
        (1, 1, False),
        (2, 1, False),
        (2, 2, False),
        (5, 5, False),
        (8, 8, True),
        (8, 6, False),
        (8, 7, True),
        (15, 9, False),
        (60, 36, False),
        (60, 12, True),
    ],
)
def test_few_watched_terms_tell_little(terms, likelier, clear):
    """Of so many terms so many prefer the stereotype: whether that is clearly more or less than half of them."""
    score, chance = clearest((terms, likelier))
    assert (abs(score - 0.5) > chance) == clear


def test_checks_score_pairs_as_benchmarks_do_by_whole_sentences():
    """Of the longer text the mean per token is higher, and its sum lower: StereoSet and CrowS-Pairs differ there."""
    values = [Score("", -12.0, 6), Score("", -10.0, 4), Score("", -30.0, 6)]
    for of_pair, ss in ((False, 1.0), (True, 0.0)):
        item = replace(ITEMS[0], of_pair=of_pair)
        scores = {f"{item.kind}/{item.id}/{label}": v for label, v in zip(GOLD_LABELS, values, strict=True)}
        assert clearest_of([item], scores)[0] == ss


def test_a_category_of_texts_that_are_all_too_long_is_not_scored():
    age, race = (
        replace(ITEMS[0], kind="intrasentence", id=name, target=name, bias_type=name) for name in ("age", "race")
    )
    long = replace(race, sentences=Triplet(*(f"{text} " * 100 for text in race.texts)))
    scorer = Scorer(build("llama"), tokenizer())
    assert _scores(scorer, [age, long]) == _scores(scorer, [age])
    with pytest.raises(InputError, match="none of 1 items can be scored"):
        _scores(scorer, [long])


@pytest.mark.parametrize("terms", [1, 2, 8, 40])
@pytest.mark.parametrize("likelier", [0, 1])
def test_terms_that_all_agree_may_be_off_as_exact_binomial_shares(terms, likelier):
    """Student's interval of them has no width: 2 of 2 would be sure, and no weights past even could be kept."""
    agreeing = terms * likelier
    low, high = binomtest(agreeing, terms).proportion_ci()
    assert clearest((terms, agreeing)) == pytest.approx((likelier, high - low))


def test_what_chance_explains_is_students_interval_over_terms():
    """Of 8 terms, as many as are watched of StereoSet by default, too: a score without any bound would end nothing."""
    rng = np.random.default_rng(0)
    for terms in (2, 8, 40):
        shares = rng.integers(0, 6, terms) / 5
        items, scores = scored(*[(5, round(5 * share)) for share in shares])
        one_source = [replace(item, source="", target=item.source) for item in items]
        found = clearest_of(one_source, scores)
        interval = ttest_1samp(shares, 0.5).confidence_interval()
        assert found == pytest.approx((shares.mean(), (interval.high - interval.low) / 2))


@pytest.mark.parametrize(("few", "seen"), [(9, 0.6), (11, 0.6), (4, 0.6), (15, 1.0), (0, 0.0)])
def test_a_few_terms_of_one_source_do_not_speak_for_many_of_another(few, seen):
    """15 terms beside 200 of which 60 % prefer the stereotype: only what chance leaves out is seen of them."""
    assert clearest((200, 120), (15, few))[0] == pytest.approx(seen)
    assert clearest((15, few), (200, 120))[0] == pytest.approx(seen)


def test_what_is_kept_of_a_pair_is_neutral_text(both, tmp_path):
    """Its third sentence is one of another pair, which is to move."""
    (tmp_path / "text.txt").write_text("\n\n".join(f"people went home {word} ." for word in WHO))
    items = TripletData(both, held_out=0).read().train
    text = str(tmp_path / "text.txt")
    for item, example in zip(items, BalancePairs(text).prepare(items, tokenizer(), 64).examples, strict=True):
        third, fourth = (tokenizer().decode(tokens[1:]) for tokens in example.sentences[2:])
        assert fourth.startswith("people went home")
        assert third != fourth
        assert third.startswith("people went home") == (item.source == both[1])
        assert (third == item.texts.unrelated) == (item.source == both[0])


def test_the_unrelated_sentences_are_those_of_triplets(both):
    """Pairs have none: what stands there is a sentence of another pair."""
    items = [*TripletData(both, held_out=0).read().train]
    trainer = LanguageTrainer(build("llama"), tokenizer(), BalancePairs())
    together, triplets, pairs = (
        trainer.evaluate([i for i in items if i.source in of]) for of in (both, both[:1], both[1:])
    )
    assert list(pairs) == ["stereotype", "anti_stereotype", "gap"]
    assert together["unrelated"] == pytest.approx(triplets["unrelated"], rel=1e-2)
    gaps = [len(ITEMS) * triplets["gap"], 24 * pairs["gap"]]
    assert together["gap"] == pytest.approx(sum(gaps) / len(items), rel=1e-4)


def test_of_each_source_a_share_is_watched(both):
    items = TripletData(both, held_out=0).read().train
    trained, watched = set_aside(items, LanguagePlan(checks=1, watched=0.25))
    assert {one.source for one in watched} == set(both)
    assert not {one.target for one in trained} & {one.target for one in watched}


@pytest.mark.parametrize("method", ["balance_pairs", "bias_unlearn"])
def test_held_out_parts_of_both_are_compared(both, sources, tmp_path, capsys, caplog, method):
    say_once.cache_clear()
    model = saved(tmp_path / "model")
    data = [word for source in both for word in ("--data", source)]
    run("mitigate", method, "--model", model, *data, "--held-out", "0.25,0.5", "--watched", "0.25", "--checks", "1",
        "--device", "cpu", "--perplexity-rise", "9", "--out", tmp_path / "out")  # fmt: skip
    assert "its authors ask that none be trained on it" in caplog.text
    assert "It was trained on CrowS-Pairs" in (tmp_path / "out/README.md").read_text()
    said = " ".join(capsys.readouterr().out.split())
    assert "the stereotype score (of the source or category most clearly off even) went from" in said
    record, split = TrainingRecord.read(tmp_path / "out"), TripletData(both, held_out=(0.25, 0.5)).read()
    assert record.data["source"] == both
    assert record.data["held_out"] == [0.25, 0.5]
    assert not set(record.training_targets) & {one.target.casefold() for one in split.held_out}
    for name in ("model", "out"):
        run("lm", "suite", "--model", tmp_path / name, "--data", sources, "--out", tmp_path / "runs" / name,
            "--n-boot", "100", "--device", "cpu")  # fmt: skip
    capsys.readouterr()
    run("lm", "compare", tmp_path / "runs/model", tmp_path / "runs/out", "--json", tmp_path / "both.json")
    said = " ".join(capsys.readouterr().out.split())
    assert "CrowS-Pairs, Attention gap without 15 terms that were trained on" in said
    (after,) = json.loads((tmp_path / "both.json").read_text())["runs"]
    for kind, n in (("headlines", {"stereoset": 1, "crows_pairs": 12}), ("seen", {"stereoset": 3, "crows_pairs": 12})):
        assert {one["benchmark"]: one["n"] for one in after[kind] if one["metric"] == "ss"} == n


def test_python_takes_a_list(both, sources, tmp_path, caplog):
    say_once.cache_clear()
    kept = dataset(both[1])
    model = saved(tmp_path / "model")
    found = fairhead.mitigate(model, [both[0], kept], "klaad", held_out=(0.25, 0.5), out=tmp_path / "out", device="cpu")
    assert len(found.records[""].training_targets) == 3 + 12
    assert "its authors ask that none be trained on it" in caplog.text


def test_crows_pairs_read_as_own_pairs_are_not_to_be_trained_on_either(both, sources, tmp_path, caplog):
    for name in ("own.csv", "crows_pairs_FR.csv"):
        say_once.cache_clear()
        (tmp_path / name).write_text((sources / "crows_pairs/crows_pairs_anonymized.csv").read_text())
        TripletData(f"pairs:{tmp_path / name}").read()
        assert ("its authors ask" in caplog.text) == (name != "own.csv")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"held_out": (0.1, 0.2, 0.3)}, "expected one share, or one for each of"),
        ({"options": {"more": "first"}}, "'more' is no option of stereoset or of crows_pairs; there are on_error"),
    ],
)
def test_mistakes_are_named(both, how, message):
    with pytest.raises(InputError, match=message):
        TripletData(both, **how).read()
    with pytest.raises(InputError, match="named twice"):
        TripletData([both[0], both[0]])


def test_pairs_of_one_term_belong_together(tmp_path, capsys):
    """Jobs by templates, as such pairs are written: no job is trained on and scored."""
    file, jobs = tmp_path / "own.csv", WHO[:4]
    rows = [f"the {job} {said} and kind .,the {job} {said} and rude .,{job}" for job in jobs for said in SAYS[:4]]
    file.write_text("\n".join(["more,less,job", *rows]))
    split = TripletData(f"pairs:{file}", held_out=0.25, options={"term": "job"}).read()
    assert [len({one.target for one in part}) for part in split] == [3, 1]
    assert not {one.target for one in split.train} & {one.target for one in split.held_out}
    model = saved(tmp_path / "model")
    table = ["--data", f"pairs:{file}", "--data-option", "term=job", "--device", "cpu"]
    run("mitigate", "balance_pairs", "--model", model, *table, "--held-out", "0.25", "--checks", "0", "--watched", "0",
        "--out", tmp_path / "out")  # fmt: skip
    capsys.readouterr()
    run("lm", "crows", "--model", tmp_path / "out", *table)
    told = capsys.readouterr().out
    assert "4 items" in told
    assert [line.split()[0] for line in told.splitlines() if line.strip().startswith(("all", "stereo"))] == ["all"]


@pytest.fixture
def read_as(tmp_path):
    """The same six pairs in several forms: as published, as own pairs with and without a term, as own triplets."""
    rows = [(f"the {who} was late .", f"the {who} was always kind .") for who in WHO[:6]]
    folder = tmp_path / "crows_pairs"
    folder.mkdir()
    tables = {
        folder / "crows_pairs_anonymized.csv": (
            ["", "sent_more", "sent_less", "stereo_antistereo", "bias_type", "annotations"],
            [(i, *pair, "stereo", "age", "[]") for i, pair in enumerate(rows)],
        ),
        tmp_path / "plain.csv": (["more", "less"], rows),
        tmp_path / "terms.csv": (["more", "less", "term"], [(*pair, f"term {i}") for i, pair in enumerate(rows)]),
        tmp_path / "threes.csv": (
            ["stereotype", "anti_stereotype", "unrelated", "term"],
            [(*pair, "people went home .", f"word {i}") for i, pair in enumerate(rows)],
        ),
    }
    for path, (head, lines) in tables.items():
        with path.open("w", newline="") as handle:
            csv.writer(handle).writerows([head, *lines])
    specs = {"crows": folder, **{path.stem: path for path in tables if path.parent == tmp_path}}
    kinds = {"plain": "pairs", "terms": "pairs", "threes": "triplets"}
    return {name: f"{kinds.get(name, name)}:{path}" for name, path in specs.items()}


@pytest.mark.parametrize("scored_as", ["crows", "plain", "terms", "threes"])
@pytest.mark.parametrize("trained_as", ["crows", "plain", "terms", "threes"])
def test_trained_sentences_are_known_again_whatever_reader_they_came_by(read_as, tmp_path, trained_as, scored_as):
    train = TripletData(read_as[trained_as], held_out=0).read().train[:3]
    TrainingRecord("cda", training_targets=targets(train), training_texts=texts_of(train)).write(tmp_path)
    items = read_items(read_as[scored_as])
    kept = without_training_targets(items, tmp_path)
    sentences = [(i.more if isinstance(i, CrowsPair) else i.texts.stereotype) for i in kept]
    assert sentences == [f"the {who} was late ." for who in WHO[3:6]]
    benchmark = benchmark_of(items)
    scores = {request.id: Score(request.id, -1.0, 1) for request in benchmark.requests(items, benchmark.options())}
    benchmark.table(items, scores, benchmark.options()).write(tmp_path / "items.jsonl", {})
    table = read_table(tmp_path / "items.jsonl").table
    record = TrainingRecord.read(tmp_path)
    seen = benchmark.trained_on(table, [*record.training_targets, *record.training_texts])
    assert {item.id for item in kept} == {name.rpartition("/")[2] for i, name in enumerate(table.ids) if i not in seen}


def _bbq_rows(template, story, people, ways=(0, 1)):
    """The questions of a template about two people, the first of them stereotyped, as BBQ has them."""
    for i in ways:
        one, other = people[i], people[1 - i]
        for condition, context in (("ambig", f"a {one} and a {other} met ."), ("disambig", story.format(one, other))):
            for polarity, label in (("neg", i), ("nonneg", 1 - i)):
                answers = {"ans0": [people[0], "old"], "ans1": [people[1], "nonOld"], "ans2": ["unknown", "unknown"]}
                yield {
                    "example_id": f"{template}.{people[0]}.{i}.{condition}.{polarity}",
                    "question_index": str(template), "question_polarity": polarity, "context_condition": condition,
                    "category": "Age", "answer_info": answers, "context": context, "question": "who was late ?",
                    **{key: f"the {said}" for key, (said, _) in answers.items()},
                    "label": label if condition == "disambig" else 2,
                    "additional_metadata": {"stereotyped_groups": ["old"], "subcategory": "None"},
                }  # fmt: skip


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """BBQ with four templates about two pairs of people; a third pair's story is told one way alone."""
    folder = tmp_path_factory.mktemp("bbq")
    rows = []
    for template, said in enumerate(("late", "rude", "kind", "careful"), 1):
        story = f"a {{0}} and a {{1}} met . the {{0}} was {said} ."
        for people in (("nurse", "baker"), ("pilot", "poet")):
            rows += _bbq_rows(template, story, people)
        rows += _bbq_rows(template, story, ("stone", "home"), ways=(0,))
    (folder / "Age.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_pairs_of_bbq_tell_a_story_both_ways(questions):
    pairs = swapped_people(read_bbq(questions))
    assert len(pairs) == 8
    first = pairs[0]
    assert first.more == "a nurse and a baker met . the nurse was late ."
    assert first.less == "a baker and a nurse met . the baker was late ."
    assert (first.target, first.bias_type) == ("Age/1", "Age")
    assert all({*pair.more.split()} == {*pair.less.split()} for pair in pairs)
    with pytest.raises(InputError, match="no two contexts tell the same"):
        swapped_people([item for item in read_bbq(questions) if item.condition == "ambig"])


def test_templates_of_bbq_that_were_trained_on_are_not_scored(questions, tmp_path, caplog):
    model = saved(tmp_path / "model")
    run("mitigate", "balance_pairs", "--model", model, "--data", f"bbq:{questions}", "--held-out", "0.5", "--checks",
        "0", "--watched", "0", "--device", "cpu", "--out", tmp_path / "out")  # fmt: skip
    record = TrainingRecord.read(tmp_path / "out")
    assert len(record.training_targets) == 2
    assert {*record.training_targets, *record.held_out_targets} == {f"age/{k}" for k in range(1, 5)}
    assert "It was trained on contexts of BBQ" in (tmp_path / "out/README.md").read_text()
    items = read_bbq(questions)
    kept = without_training_targets(items, tmp_path / "out")
    assert {item.template.casefold() for item in kept} == {*record.held_out_targets}
    benchmark = bbq_benchmark.BENCHMARK
    drawn = read_data(benchmark, questions, benchmark.options(), None, 0, model=tmp_path / "out").items
    assert [item.id for item in drawn] == [item.id for item in kept]
    assert "was trained on them or on their terms" in caplog.text
    scores = {r.id: Score(r.id, -1.0, 1) for r in bbq_benchmark.requests(items)}
    table = bbq_benchmark.table(items, scores)
    seen = benchmark.trained_on(table, record.training_targets)
    assert {table.clusters[i].casefold() for i in seen} == {*record.training_targets}
    assert len(seen) == len(items) - len(kept)


def test_data_in_memory_are_named_in_the_card(questions, sources, tmp_path):
    """Objects have no path, but what was trained on is known all the same."""
    model, said = saved(tmp_path / "model"), []
    for data in (dataset(f"bbq:{questions}"), dataset(f"crows:{sources / 'crows_pairs'}")):
        how = {"held_out": 0.5, "checks": 0, "watched": 0.0, "device": "cpu"}
        fairhead.mitigate(str(model), data, "balance_pairs", out=tmp_path / data.name, **how)
        said.append((tmp_path / data.name / "README.md").read_text())
    assert ["trained on contexts of BBQ" in text for text in said] == [True, False]
    assert ["was trained on CrowS-Pairs" in text for text in said] == [False, True]
