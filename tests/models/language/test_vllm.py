"""What is scored by vLLM, with an engine whose log-probabilities are known, and what is refused before it is loaded."""

import sys
from types import SimpleNamespace

import pytest
import torch
from language_models import VOCABULARY, build, saved, tokenizer

from fairhead.errors import InputError, UnsupportedModel
from fairhead.language import Request, Scorer, load_scorer
from fairhead.language.answers import Journal
from fairhead.language.scorer import VLLMScorer
from fairhead.mitigate.without_training import SelfDebias
from fairhead.models import attach, save

REQUESTS = [
    Request("after a prefix", "the nurse said", " she was tired ."),
    Request("a whole text", "", "the baker was kind ."),
    Request("too long", "the nurse", " was very kind" * 20),
]


class Engine:
    """The log-probability of a token is minus its number and a hundredth of its place."""

    def __init__(self):
        config = {"dtype": torch.float32, "max_model_len": 33, "architectures": ["LlamaForCausalLM"]}
        of_model = SimpleNamespace(**config, get_vocab_size=lambda: VOCABULARY)
        self.llm_engine, self.read = SimpleNamespace(model_config=of_model), []

    def generate(self, prompts, how, use_tqdm):
        assert how == {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        self.read += [prompt["prompt_token_ids"] for prompt in prompts]
        return [
            SimpleNamespace(
                prompt_logprobs=[
                    {token: SimpleNamespace(logprob=-token - place / 100)} if place else None
                    for place, token in enumerate(prompt["prompt_token_ids"])
                ]
            )
            for prompt in prompts
        ]


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict, __version__="9.9"))
    return Engine()


def test_the_scored_tokens_of_each_text_are_added_up(engine, tmp_path):
    words = tokenizer()
    scorer = VLLMScorer(engine, words, folder=saved(tmp_path))
    with Journal(tmp_path / "journal.jsonl", scorer.settings()) as journal:
        found = scorer.score(REQUESTS, on_long="skip", journal=journal)
        assert found.too_long == ("too long",)
        for request, first in zip(REQUESTS[:2], (4, 1), strict=True):
            ids = [words.bos_token_id, *words(request.prefix + request.continuation).input_ids]
            expected = -sum(token + place / 100 for place, token in enumerate(ids) if place >= first)
            assert found[request.id].logprob == pytest.approx(expected)
            assert found[request.id].n_tokens == len(ids) - first
        assert scorer.score(REQUESTS, on_long="skip", journal=journal) == found
    assert len(engine.read) == 2  # the journal has the others
    own = Scorer(build("llama"), words).settings()
    settings = scorer.settings()
    assert settings.pop("engine") == "vllm 9.9"
    assert {key for key in own if own[key] != settings[key]} == {"weights"}  # a hash of the files
    with pytest.raises(UnsupportedModel, match="leave --engine vllm out"):
        _ = scorer.attending


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"engine": "vlm"}, "expected one of transformers, vllm. Did you mean 'vllm'"),
        ({"device": "cpu", "load_in": "8bit"}, "what --device, --load-in would"),
        ({"tokenizer": tokenizer()}, "found a model object"),
    ],
)
def test_what_means_nothing_to_vllm_is_refused(tmp_path, options, expected):
    model = build("llama") if "tokenizer" in options else saved(tmp_path)
    with pytest.raises(InputError, match=expected):
        load_scorer(model, **{"engine": "vllm", **options})


def test_models_that_vllm_would_read_otherwise_are_refused(tmp_path, monkeypatch):
    method = SelfDebias(("rude",), sentence="{} so")
    save(attach(build("llama"), method, tokenizer()), tmp_path, tokenizer().save_pretrained)
    with pytest.raises(UnsupportedModel, match="carries a method"):
        load_scorer(tmp_path, engine="vllm")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="without accelerate launch"):
        load_scorer(tmp_path, engine="vllm")
