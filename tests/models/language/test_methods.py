"""The methods that KLAAD is compared with, by closed forms and on made tasks."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from language_models import FAMILIES, ITEMS, VOCABULARY, build, saved, tokenizer

from fairhead.cli import main
from fairhead.data.sentences import StereoSetItem, Triplet, TripletSplit
from fairhead.errors import InputError
from fairhead.language import Request, load_scorer
from fairhead.language.answers import Prompt, Sampling
from fairhead.language.attention_reading import read_gaps
from fairhead.language.benchmarks import attention_entropy
from fairhead.language.benchmarks.attention_gap import SentencePair
from fairhead.language.benchmarks.perplexity import Document
from fairhead.language.generation import generate
from fairhead.language.lexicons import read_swaps
from fairhead.language.scorer import Scorer
from fairhead.mitigate import names
from fairhead.mitigate.language_result import MitigatedLanguage
from fairhead.mitigate.language_trainer import LanguageTrainer
from fairhead.mitigate.sentence_losses import CDA, BiasUnlearn
from fairhead.mitigate.triplets import TokenTriplet, stack_triplets
from fairhead.mitigate.without_training import SelfDebias, directions, project_out
from fairhead.models import attach, load, method_of, open_model, save
from fairhead.train import LanguagePlan
from fairhead.train.tuning import Look, tune

TEXTS = ("the old nurse said that she was kind .", "he went home so she was late .", "she was careful with money .")
PLAN = LanguagePlan(epochs=25, batch_size=6, learning_rate=3e-3)


@pytest.fixture
def swaps(tmp_path):
    file = tmp_path / "pairs.txt"
    file.write_text("he\tshe\n")
    return str(file)


def sentences(*texts, target="nurse"):
    """Items whose stereotype is the text; its opposite and the unrelated sentence have no word to swap."""
    other = Triplet("", "people said that the poet was late .", "the old baker was blue .")
    return tuple(
        StereoSetItem(f"{target}{i}", "intrasentence", target, "gender", "", other._replace(stereotype=text))
        for i, text in enumerate(texts)
    )


def log_odds_of_she(model, text="the nurse said that"):
    words = tokenizer()
    ids = torch.tensor([[0, *words(text)["input_ids"]]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, -1]
    she, he = (words.convert_tokens_to_ids(word) for word in ("she", "he"))
    return float(logits[she] - logits[he])


def test_cda_trains_on_each_sentence_and_its_counterfactual(swaps):
    words = tokenizer()
    method = CDA(swaps)
    prepared = method.prepare(sentences(*TEXTS), words, context=32)
    found = [words.decode(example[1:]) for example in prepared.examples]
    assert found[:2] == [TEXTS[0], TEXTS[0].replace("she", "he")]
    assert "she went home so he was late ." in found
    assert len(found) == 6
    assert not prepared.left_out
    assert len(CDA(swaps, one_sided=True).prepare(sentences(*TEXTS), words, 32).examples) == 3
    assert len(CDA(swaps, all_sentences=True).prepare(sentences(*TEXTS), words, 32).examples) == 9
    assert CDA(swaps).prepare(ITEMS[:1], words, 32).left_out == {"no word of the swap lists": (ITEMS[0].id,)}
    long = CDA(swaps).prepare(sentences("she " * 40), words, 32)
    assert long.left_out == {"longer than the model's context": ("nurse0",)}


def test_the_loss_of_cda_is_the_models_own(swaps):
    model = build("llama")
    examples = CDA(swaps).prepare(sentences(TEXTS[0]), tokenizer(), 32).examples
    with CDA(swaps).session(model) as loss, torch.no_grad():
        ids = torch.tensor(examples)
        assert float(loss(examples)["loss"]) == pytest.approx(float(model(input_ids=ids, labels=ids).loss), rel=1e-5)


def test_cda_closes_a_gap_that_plain_training_opens(swaps, tmp_path):
    texts = [f"the {who} said that she was {how} ." for who in ("nurse", "old nurse") for how in ("kind", "late")]
    plain, method = build("llama", scale=1.0), CDA(swaps)
    # The same number of sentences, each repeated instead of swapped.
    examples = [(0, *ids) for ids in tokenizer()([*texts, *texts])["input_ids"]]
    with method.session(plain) as loss:
        tune(plain, examples, [len(example) for example in examples], loss, PLAN)
    trainer = LanguageTrainer(build("llama", scale=1.0), tokenizer(), method, PLAN)
    trainer.train(TripletSplit(sentences(*texts[:3]), sentences(texts[3])))
    assert log_odds_of_she(plain) > 2
    assert abs(log_odds_of_she(trainer.model)) < 0.5
    # Its loss has one part, which is measured on what was held out.
    held_out = trainer.record.results["held_out"]
    assert held_out["items"] == 1
    assert held_out["after"]["loss"] < held_out["before"]["loss"]
    assert "No term was held out" not in str(MitigatedLanguage({"": trainer.record}, tmp_path).page().to_dict())


def triplet_logits(n=2, length=4, seed=0):
    triplets = [TokenTriplet(str(i), *((0, *range(1 + i, length + i)) for _ in range(3))) for i in range(n)]
    torch.manual_seed(seed)
    return stack_triplets(triplets), torch.randn(3 * n, length, VOCABULARY)


def test_bias_unlearn_of_an_unchanged_model_is_known():
    batch, logits = triplet_logits()
    parts = BiasUnlearn().parts(logits, logits, batch, torch.tensor([False, False]))
    assert float(parts["forget"]) == pytest.approx(2 / 0.1 * math.log(2), rel=1e-5)
    assert float(parts["keep"]) == pytest.approx(0, abs=1e-6)
    expected = torch.nn.functional.cross_entropy(logits[2:4, :-1].flatten(0, 1), batch.ids[2:4, 1:].flatten())
    assert float(parts["retain"]) == pytest.approx(float(expected), rel=1e-5)
    assert float(parts["loss"]) == pytest.approx(0.5 * 20 * math.log(2) + 0.3 * float(expected), rel=1e-5)


def test_the_pull_on_a_stereotype_fades_as_it_grows_unlikely():
    batch, before = triplet_logits()
    logits, delta = before.clone(), 3.0
    own = batch.ids[:2, 1:]  # lower the logit of every token of the stereotypes
    logits[:2, :-1] = logits[:2, :-1].scatter_add(2, own[..., None], torch.full((2, 3, 1), -delta))
    rise = [
        float((before[i, :-1].log_softmax(-1) - logits[i, :-1].log_softmax(-1)).gather(1, own[i, :, None]).sum())
        for i in range(2)
    ]
    beta = 0.1
    expected = np.mean([-2 / beta * math.log(1 / (1 + math.exp(-beta * r))) for r in rise])
    parts = BiasUnlearn(beta=beta).parts(logits, before, batch, torch.tensor([False, False]))
    assert float(parts["forget"]) == pytest.approx(expected, rel=1e-5)
    assert expected < 2 / beta * math.log(2)
    # With the anti-stereotypes, which have not changed, in the set as well, half of it is as it was.
    both = BiasUnlearn(beta=beta).parts(logits, before, batch, torch.tensor([True, True]))
    assert float(both["forget"]) == pytest.approx((expected + 2 / beta * math.log(2)) / 2, rel=1e-5)


def test_what_is_kept_is_the_divergence_from_the_pretrained_model():
    batch, before = triplet_logits()
    _, logits = triplet_logits(seed=1)
    found = float(BiasUnlearn().parts(logits, before, batch, torch.tensor([False, False]))["keep"])
    old, new = (torch.distributions.Categorical(logits=x[4:, :-1]) for x in (before, logits))
    assert found == pytest.approx(float(torch.distributions.kl_divergence(old, new).mean()), rel=1e-5)


@pytest.mark.parametrize("lora", [None, 4])
def test_bias_unlearn_turns_the_preference_and_keeps_the_rest(lora):
    # LoRA's matrices are on the attention, which in a fresh model hardly matters.
    model = build("llama", scale=1.0 if lora is None else 4.0)
    rate = 1e-3 if lora is None else 1e-2
    trainer = LanguageTrainer(model, tokenizer(), BiasUnlearn(), LanguagePlan(20, 4, rate, lora=lora))
    before = trainer.evaluate(ITEMS)
    history = trainer.train(TripletSplit(ITEMS, ())).history
    after = trainer.evaluate(ITEMS)
    assert history[0]["keep"] == pytest.approx(0, abs=1e-5)  # it begins as the pretrained model
    moved = (after["stereotype"] - after["anti_stereotype"]) - (before["stereotype"] - before["anti_stereotype"])
    assert moved > 0.1
    assert abs(after["unrelated"] - before["unrelated"]) < after["stereotype"] - before["stereotype"] + 0.5


def test_bias_unlearn_trains_on_the_category_farthest_from_even():
    items = [StereoSetItem(**{**vars(i), "bias_type": t, "id": f"{t}{i.id}"}) for t in ("age", "race") for i in ITEMS]
    scores = {"age": 0.55, "race": 0.35}
    assert BiasUnlearn().choose(items, lambda some: scores[some[0].bias_type]) == "race"
    assert BiasUnlearn(category="all").choose(items, lambda some: 1 / 0) is None
    assert BiasUnlearn().choose(ITEMS, lambda some: 1 / 0) is None  # there is one
    trainer = LanguageTrainer(build("llama"), tokenizer(), BiasUnlearn(), LanguagePlan(1, 4, 1e-3))
    trainer.train(TripletSplit(tuple(items), ()))
    assert trainer.record.results["category"] in scores
    assert trainer.record.results["items"] == len(ITEMS)


def test_bias_unlearn_swaps_the_sets_while_the_score_is_below_even():
    model = build("llama")
    examples = BiasUnlearn().prepare(ITEMS, tokenizer(), 32).examples
    turned = [(t._replace(stereotype=t[2], anti_stereotype=t[1]), mix) for t, mix in examples]
    for swap in (True, False):
        with torch.no_grad(), BiasUnlearn(swap=swap).session(model) as loss:
            plain, other = float(loss(examples)["retain"]), float(loss(turned)["retain"])
            assert plain != pytest.approx(other, rel=1e-4)
            loss.see(Look(0.45, 10.0))
            assert float(loss(examples)["retain"]) == pytest.approx(other if swap else plain)
            loss.see(Look(0.55, 10.0))
            assert float(loss(examples)["retain"]) == pytest.approx(plain)


def test_half_of_the_opposites_are_forgotten_too_where_asked():
    examples = BiasUnlearn(anti_in_forget=0.5).prepare(ITEMS, tokenizer(), 32).examples
    assert [mixed for _, mixed in examples] == [False, True, False, True]
    for wrong in ({"beta": 0}, {"anti_in_forget": 2}, {"keep_weight": -1}):
        with pytest.raises(InputError, match="expected"):
            BiasUnlearn(**wrong)


@pytest.mark.parametrize("family", FAMILIES)
def test_directions_are_the_components_of_differences_of_pooled_states(family, swaps):
    model, words = build(family), tokenizer()
    made = read_swaps(swaps)
    pairs = [(text, made.swapped(text)) for text in TEXTS]
    axes = directions(model, words, pairs, components=2, batch_size=2)

    def pooled(text):
        with torch.no_grad():
            found = model(input_ids=torch.tensor([[0, *words(text)["input_ids"]]]), output_hidden_states=True)
        return found.hidden_states[-1][0].double().mean(0).numpy()

    table = np.array([pooled(a) - pooled(b) for a, b in pairs])
    vectors = np.linalg.eigh(table.T @ table)[1][:, ::-1][:, :2].T
    assert np.abs((axes.numpy() * vectors).sum(1)) == pytest.approx(1, abs=1e-4)
    # Folded into the output layer it is the projection of the last states.
    ids = torch.tensor([[0, *words(TEXTS[0])["input_ids"]]])
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
        seen = states - (states @ axes.T) @ axes
        inputs = model.get_input_embeddings().weight.clone()
        expected = seen @ model.get_output_embeddings().weight.T
        if family == "gemma-2":
            cap = model.config.final_logit_softcapping
            expected = cap * torch.tanh(expected / cap)
        project_out(model, axes)
        assert model(input_ids=ids).logits.numpy() == pytest.approx(expected.numpy(), abs=2e-4)
    assert torch.equal(model.get_input_embeddings().weight, inputs)


def by_hand(model, words, prefixes, ids, decay=50.0, floor=0.01):
    """p · max(ε, e^(−λ · max(0, p_biased − p))) after `ids`, by plain forward passes: [V]."""
    with torch.no_grad():
        p = model(input_ids=torch.tensor([ids])).logits[0, -1].double().softmax(-1)
        biased = [
            model(input_ids=torch.tensor([[0, *words(prefix)["input_ids"], *ids[1:]]]))
            .logits[0, -1]
            .double()
            .softmax(-1)
            for prefix in prefixes
        ]
    raised = torch.stack(biased).amax(0)
    changed = p * torch.exp(-decay * (raised - p).clamp(min=0)).clamp(min=floor)
    return changed / changed.sum()


SELF = SelfDebias(("rude", "very cold"), sentence="people said that the {} so")
PREFIXES = ("people said that the rude so", "people said that the very cold so")


@pytest.mark.parametrize("family", FAMILIES)
def test_self_debiased_scores_equal_two_readings_by_hand(family):
    model, words = build(family), tokenizer()
    scorer = Scorer(SELF.attach(model, words), words)
    requests = [
        Request("a", "the nurse", " was kind"),
        Request("b", "the nurse", " was rude ."),
        Request("c", "", "he"),
    ]
    found = scorer.score(requests, per_token=True)
    plain = Scorer(model, words).score(requests)
    for request in requests:
        ids = [0, *words(request.prefix)["input_ids"]]
        for token, value in zip(words(request.continuation)["input_ids"], found[request.id].per_token, strict=True):
            assert value == pytest.approx(float(by_hand(model, words, PREFIXES, ids)[token].log()), abs=1e-3)
            ids.append(token)
    assert any(abs(found[r.id].logprob - plain[r.id].logprob) > 0.01 for r in requests)
    digests = [
        replace(SELF, **other).attach(model, words) for other in ({}, {"decay": 49.0}, {"bias_types": ("cold",)})
    ]
    digests = [Scorer(one, words).settings()["weights"] for one in (*digests, model)]
    assert len(set(digests)) == 4  # no journal takes scores of one for those of another
    assert digests[0] == scorer.settings()["weights"]


def test_attention_under_self_debiasing_is_that_of_the_text_alone():
    model, words = build("llama"), tokenizer()
    pairs = [SentencePair("0", "the nurse was kind .", "the nurse was rude .", (), "0")]
    documents = [Document("d", "the old nurse said that she was kind .")]
    plain, changed = Scorer(model, words), Scorer(SELF.attach(model, words), words)
    assert np.array_equal(read_gaps(plain, pairs).on, read_gaps(changed, pairs).on)
    assert np.array_equal(
        attention_entropy.table(plain, documents).values, attention_entropy.table(changed, documents).values
    )


@pytest.mark.parametrize("family", ["llama", "gpt-2"])
def test_self_debiased_text_is_drawn_from_the_same_distribution(family):
    model, words = build(family), tokenizer()
    words.eos_token = None
    model.generation_config.eos_token_id = None
    scorer = Scorer(SELF.attach(model, words), words)
    prompts = [Prompt("a", "the old nurse was"), Prompt("b", "she")]
    found = generate(scorer, prompts, Sampling(max_new_tokens=4, temperature=0))
    for prompt in prompts:
        ids = [0, *words(prompt.text)["input_ids"]]
        for _ in range(4):
            ids.append(int(by_hand(model, words, PREFIXES, ids).argmax()))
        assert found[prompt.id].text == words.decode(ids[-4:], skip_special_tokens=True)


def test_self_debiasing_without_decay_changes_nothing():
    model, words = build("llama"), tokenizer()
    requests = [Request("a", "the nurse", " was kind")]
    plain = Scorer(model, words).score(requests)["a"].logprob
    for settings in ({"decay": 0.0}, {"floor": 1.0}):
        changed = SelfDebias(("rude",), sentence="{} so", **settings).attach(model, words)
        assert Scorer(changed, words).score(requests)["a"].logprob == pytest.approx(plain, abs=1e-4)
    assert changed.config.max_position_embeddings == model.config.max_position_embeddings - 2
    for wrong in ({"bias_types": ()}, {"floor": 0.0}, {"sentence": "none"}):
        with pytest.raises(InputError):
            SelfDebias(**wrong)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def stereoset(tmp_path_factory):
    """Twelve terms, as StereoSet is published."""
    labels = ("stereotype", "anti-stereotype", "unrelated")
    blanks = ("kind", "rude", "blue")
    items = []
    for i in range(12):
        context = f"the nurse said that {'he' if i % 2 else 'she'} was BLANK"
        said = [
            {"sentence": context.replace("BLANK", b), "gold_label": g, "id": f"{i}{g}"}
            for b, g in zip(blanks, labels, strict=True)
        ]
        items.append({"id": str(i), "target": f"term{i}", "bias_type": "gender", "context": context, "sentences": said})
    path = tmp_path_factory.mktemp("stereoset") / "dev.json"
    path.write_text(json.dumps({"version": "1.1", "data": {"intrasentence": items, "intersentence": []}}))
    return path


@pytest.mark.parametrize("method", [name for name in names("language") if name != "klaad"])
def test_every_method_writes_a_model_that_can_be_scored(method, folder, stereoset, swaps, tmp_path, capsys):
    out = tmp_path / method
    arguments = ["mitigate", method, "--model", str(folder), "--out", str(out), "--device", "cpu"]
    if method != "self_debias":
        arguments += ["--data", f"stereoset:{stereoset}"]
    if method in ("cda", "sentence_debias"):
        arguments += ["--swaps", swaps]
    if method in ("cda", "bias_unlearn"):
        arguments += ["--lr", "1e-3"]
    if method in ("balance_pairs", "bias_unlearn"):
        arguments += ["--checks", "0"]
    main(arguments)
    assert f"model: {out}" in capsys.readouterr().out
    record = json.loads((out / "fairhead-training.json").read_text())
    assert record["method"] == method
    assert bool(record["training_targets"]) == (method != "self_debias")
    assert ModelCard.load(out / "README.md").data.pipeline_tag == "text-generation"
    request = [Request("a", "the nurse said that", " she was kind")]
    before, after = (load_scorer(path, device="cpu").score(request)["a"].logprob for path in (folder, out))
    assert before != pytest.approx(after, abs=1e-6)
    written = (out / "model.safetensors").stat().st_mtime_ns
    main(arguments)  # what is complete is kept
    assert (out / "model.safetensors").stat().st_mtime_ns == written


def test_the_folder_of_a_method_at_decoding_says_how_it_must_be_loaded(folder, tmp_path):
    main(["mitigate", "self_debias", "--model", str(folder), "--out", str(tmp_path / "self"), "--device", "cpu"])
    said = (tmp_path / "self" / "README.md").read_text()
    assert "self_debias" in said
    assert 'fairhead.load("THIS FOLDER")' in said
    assert method_of(load(tmp_path / "self")) is not None


def test_a_folder_of_self_debiasing_is_read_with_its_settings(folder, tmp_path):
    loaded = open_model(folder, "causal")
    wanted = attach(loaded.model, SelfDebias(("rude",), sentence="{} so"), loaded.tokenizer)
    save(wanted, tmp_path, loaded.tokenizer.save_pretrained)
    again = load_scorer(tmp_path, device="cpu").model
    assert method_of(again) == method_of(load(tmp_path)) == SelfDebias(("rude",), sentence="{} so")
    ids = torch.tensor([[0, 1, 2, 3]])
    torch.testing.assert_close(again(ids).logits, wanted(ids).logits, rtol=0, atol=0)
    torch.testing.assert_close(load(tmp_path)(ids).logits, wanted(ids).logits, rtol=0, atol=0)
    with pytest.raises(InputError, match="leave --start, --as and --chat out"):
        load_scorer(tmp_path, device="cpu", convention="lm-eval")
    wanted.base.save_pretrained(tmp_path)  # the plain model again, by its own means
    assert method_of(load(tmp_path)) is None


@pytest.mark.parametrize("family", ["gpt-2", "gemma-2"])
def test_an_output_layer_that_was_tied_is_read_back_as_its_own(family, tmp_path):
    model = build(family)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    axis = torch.nn.functional.normalize(torch.randn(1, 32, generator=torch.Generator().manual_seed(0)))
    project_out(model, axis)
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    again = load_scorer(tmp_path, device="cpu").model
    ids = torch.tensor([[0, 3, 5]])
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
        assert float((again.get_output_embeddings().weight @ axis.T).abs().max()) < 1e-5
        assert float((again.get_input_embeddings().weight @ axis.T).abs().max()) > 0.1
