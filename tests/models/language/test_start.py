"""The token that texts start with, and where it stands, against plain forward passes."""

import pytest
import torch
from language_models import ITEMS, build, tokenizer

from fairhead.errors import InputError
from fairhead.language.answers import Prompt, Request, Sampling
from fairhead.language.benchmarks import attention_entropy
from fairhead.language.benchmarks.perplexity import Document
from fairhead.language.benchmarks.perplexity import table as perplexity_table
from fairhead.language.generation import generate
from fairhead.language.packing import start_token, starting
from fairhead.language.scorer import Scorer
from fairhead.mitigate.triplets import encode_triplets
from fairhead.train.step import say_once

TEXT = "the old nurse was kind and the pilot was late"
TOKEN = "home"  # as good as any other
IDS = tokenizer()(TEXT)["input_ids"]


def plain_logprobs(model, ids):
    """Log-probabilities of the tokens after the first of one sequence."""
    with torch.no_grad():
        table = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    return table.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


@pytest.mark.parametrize("family", ["gpt-2", "llama"])
@pytest.mark.parametrize("start", ["bos", TOKEN, "none"])
def test_texts_start_with_the_token_that_was_chosen(family, start):
    model, words = build(family), tokenizer()
    lead = {"bos": [0], "none": []}.get(start, [words.convert_tokens_to_ids(TOKEN)])
    scorer = Scorer(model, words, start=start)
    found = scorer.score([Request("a", "", TEXT), Request("b", "the old nurse", " was")], per_token=True)
    assert found["a"].per_token == pytest.approx(plain_logprobs(model, [*lead, *IDS]), abs=1e-4)
    assert found["b"].per_token == pytest.approx(plain_logprobs(model, [*lead, *IDS[:4]])[-1:], abs=1e-4)
    assert scorer.settings()["start"] == start
    # All that reads texts has the same beginning.
    whole = perplexity_table(scorer, [Document("d", TEXT)])
    assert whole.column("logprob")[0] == pytest.approx(found["a"].logprob, abs=1e-4)
    assert attention_entropy.table(scorer, [Document("d", TEXT)]).column("rows")[0] == len(lead) + len(IDS) - 1
    assert encode_triplets(ITEMS[:1], starting(words, start)).triplets[0].stereotype[: len(lead)] == tuple(lead)
    assert len(generate(scorer, [Prompt("p", TEXT)], Sampling(max_new_tokens=2, temperature=0))) == 1


def test_what_is_not_there_cannot_start_a_text():
    words = tokenizer()
    assert start_token(starting(words, TOKEN)).name == TOKEN
    assert start_token(words).name == "<s>"  # the tokeniser itself is as it was
    with pytest.raises(InputError, match="no token 'nowhere' to start a text with"):
        Scorer(build("llama"), words, start="nowhere")
    with pytest.raises(InputError, match="its only token has none before it"):
        Scorer(build("llama"), words, start="none").score([Request("a", "", "the")])
    words.bos_token = words.eos_token = None
    with pytest.raises(InputError, match="neither a BOS nor an end-of-text"):
        start_token(words)
    with pytest.raises(InputError, match="no token 'eos'"):
        start_token(words, "eos")


def test_bias_bench_reads_the_first_token_after_the_start_and_the_others_without_it():
    model, words = build("gpt-2"), tokenizer()
    scorer = Scorer(model, words, convention="bias-bench")
    texts = [TEXT, "the nurse", "the"]
    found = scorer.score([Request(text, "", text) for text in texts], per_token=True)
    for text in texts:
        ids = words(text)["input_ids"]
        expected = [*plain_logprobs(model, [0, ids[0]]), *(plain_logprobs(model, ids) if len(ids) > 1 else [])]
        assert found[text].per_token == pytest.approx(expected, abs=1e-4)
    assert scorer.settings()["as"] == "bias-bench"
    with pytest.raises(InputError, match="--start none has none"):
        Scorer(model, words, start="none", convention="bias-bench")


def test_perplexity_without_a_start_token_leaves_out_the_first_token_of_a_document():
    model = build("gpt-2")
    scorer = Scorer(model, tokenizer(), start="none")
    assert perplexity_table(scorer, [Document("d", TEXT)]).column("tokens").tolist() == [len(IDS) - 1]
    narrow = perplexity_table(scorer, [Document("d", TEXT)], window=4)
    expected = sum(sum(plain_logprobs(model, IDS[i : i + 4])) for i in range(0, len(IDS) - 1, 3))
    assert narrow.column("logprob")[0] == pytest.approx(expected, abs=1e-4)


def test_a_start_token_of_the_chat_template_is_warned_of(caplog):
    say_once.cache_clear()
    model, words = build("llama"), tokenizer()
    words.chat_template = "{{ '<s>' + messages[0]['content'] }}"
    Scorer(model, words, start="bos")
    assert not caplog.messages
    Scorer(model, words)
    assert "texts start with <s>, a control token" in caplog.text
    assert "--start" in caplog.text


TEMPLATE = "<s> {% for m in messages %}old {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}so {% endif %}"


def test_a_prompt_is_a_message_of_the_chat_template_and_its_continuation_the_answer():
    model, words = build("llama"), tokenizer()
    words.chat_template = TEMPLATE
    scorer = Scorer(model, words, chat=True)
    requests = [Request("a", "the nurse", " was kind"), Request("b", "the nurse", " was late"), Request("c", "", TEXT)]
    found = scorer.score(requests, per_token=True)
    for name, whole, tokens in (
        ("a", "<s> old the nurse so was kind", 2),
        ("b", "<s> old the nurse so was late", 2),
        ("c", f"<s> old so {TEXT}", len(IDS)),
    ):
        ids = words(whole, add_special_tokens=False)["input_ids"]
        assert found[name].per_token == pytest.approx(plain_logprobs(model, ids)[-tokens:], abs=1e-4)
    assert scorer.settings()["chat"] is True
    assert "chat" not in Scorer(model, words).settings()
    drawn = generate(scorer, [Prompt("p", "the nurse ")], Sampling(max_new_tokens=1, temperature=0))["p"]
    ids = words("<s> old the nurse so", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        assert drawn.text == words.decode(model(torch.tensor([ids])).logits[0, -1].argmax())
    # Text that answers nothing starts as it always does.
    plain = Scorer(model, words)
    assert perplexity_table(scorer, [Document("d", TEXT)]).column("logprob") == pytest.approx(
        perplexity_table(plain, [Document("d", TEXT)]).column("logprob")
    )


def test_a_chat_template_that_is_not_there_or_refuses_is_said():
    words = tokenizer()
    with pytest.raises(InputError, match="has no chat template: leave --chat out"):
        Scorer(build("llama"), words, chat=True)
    words.chat_template = "{{ raise_exception('only with a system message') }}"
    with pytest.raises(InputError, match="refuses a user's message: only with a system message"):
        Scorer(build("llama"), words, chat=True)
    words.chat_template = TEMPLATE
    with pytest.raises(InputError, match="a chat template has a start of its own"):
        Scorer(build("llama"), words, chat=True, start="none")
