"""What a language model writes after prompts.

Each prompt draws its tokens with numbers of its own, made of the seed and its id, and prompts are always read in the
same batches; a run that was killed and goes on writes what an unbroken one would have written.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from fairhead.data.splits import shuffle_by_hash
from fairhead.errors import InputError
from fairhead.language.answers import (
    Answers,
    Generation,
    GenerationJournal,
    Progress,
    Prompt,
    Sampling,
    refuse_duplicates,
)
from fairhead.language.packing import TokenSequence, as_chat, token_ids
from fairhead.language.row_layout import quiet
from fairhead.language.scorer import Scorer


def generate(
    scorer: Scorer,  # the model, its tokeniser and the token that a text starts with
    prompts: Sequence[Prompt],  # with distinct ids
    sampling: Sampling | None = None,  # how tokens are drawn
    *,
    # An open journal: what it holds is not computed again, what is computed is written at once
    journal: GenerationJournal | None = None,
    progress: Progress | None = None,  # called after each batch
) -> Answers[Generation]:
    """Continue prompts."""
    how = sampling or Sampling()
    refuse_duplicates(prompts, "prompts")
    tokens = _encode(scorer, prompts)
    fits = [i for i, ids in enumerate(tokens) if len(ids) + how.max_new_tokens <= scorer.context]
    too_long = tuple(prompts[i].id for i in sorted({*range(len(prompts))} - {*fits}))
    # The longest first: if memory is too small for them, that shows at once. Their order depends on the prompts alone.
    order = sorted(fits, key=lambda i: (-len(tokens[i]), prompts[i].id))
    together = how.batch_size if order and _heeds_mask(scorer) else 1
    found: dict[str, Generation] = {}
    for begin in range(0, len(order), together):
        batch = order[begin : begin + together]
        kept = [journal.find(prompts[i]) if journal is not None else None for i in batch]
        if any(one is None for one in kept):
            # A batch of which a part is there is read whole: alone, the rest might be rounded another way.
            made = _continue(scorer, [prompts[i] for i in batch], [tokens[i] for i in batch], how)
            new = [k for k, one in enumerate(kept) if one is None]
            if journal is not None:
                journal.add([prompts[batch[k]] for k in new], [made[k] for k in new])
            kept = [old or fresh for old, fresh in zip(kept, made, strict=True)]
        found |= {one.id: one for one in kept if one is not None}
        if progress is not None:
            progress(len(found) + len(too_long), len(prompts))
    return Answers({p.id: found[p.id] for p in prompts if p.id in found}, too_long)


def write_after(
    scorer: Scorer,
    texts: Sequence[str],  # whose first tokens begin the new texts, in turn
    count: int,
    longest: int,  # new tokens of each
    seed: int = 0,
    progress: Progress | None = None,  # called after each batch
) -> list[TokenSequence]:
    """Texts that a model writes, by token, the new ones scored; nothing, where it cannot write."""
    lead, mixed = scorer.start_token.lead, shuffle_by_hash(texts, seed=0)
    first = [ids[: len(lead) + 1] for ids in token_ids(scorer.tokenizer, mixed, lead) if len(ids) > len(lead)]
    if not (first and hasattr(scorer.model, "generate")):
        return []
    scorer.refuse_unknown([max(ids) for ids in first])
    how = Sampling(max(1, min(longest, scorer.context // 2)), top_k=0, top_p=1.0, seed=seed)
    together = how.batch_size if _heeds_mask(scorer) else 1
    found: list[TokenSequence] = []
    for begin in range(0, count, together):
        names = range(begin, min(begin + together, count))
        begun = [first[i % len(first)] for i in names]
        drawn = _drawn(scorer, [str(i) for i in names], begun, how)
        found += [TokenSequence((*b, *new), len(b)) for b, new in zip(begun, drawn, strict=True) if new]
        if progress is not None:
            progress(names[-1] + 1, count)
    return found


def _encode(scorer: Scorer, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Tokens of each prompt, the start token first."""
    texts = [prompt.text.rstrip() for prompt in prompts]
    texts = as_chat(scorer.tokenizer, texts) if scorer.chat and texts else texts
    encoded = token_ids(scorer.tokenizer, texts)
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not ids:
            raise InputError(f"prompt {prompt.id!r} has no token; expected a text")
        scorer.refuse_unknown(ids)
    return encoded if scorer.chat else [[*scorer.start_token.lead, *ids] for ids in encoded]


def _heeds_mask(scorer: Scorer) -> bool:
    """Whether a model leaves out tokens that its mask hides; RWKV reads padding like any other token."""
    model: Any = scorer.attending
    place = torch.arange(4, device=scorer.device)[None]
    masks = torch.ones_like(place), (place > 1).long()
    with quiet(model):
        seen = [model(input_ids=place % scorer.vocabulary, attention_mask=m, use_cache=False).logits for m in masks]
    return not torch.equal(*(logits[0, -1] for logits in seen))


def _continue(
    scorer: Scorer, prompts: Sequence[Prompt], tokens: Sequence[Sequence[int]], how: Sampling
) -> list[Generation]:
    drawn = zip(prompts, _drawn(scorer, [prompt.id for prompt in prompts], tokens, how), strict=True)
    decode = scorer.tokenizer.decode
    return [Generation(prompt.id, decode(new, skip_special_tokens=True), len(new)) for prompt, new in drawn]


def _drawn(scorer: Scorer, names: Sequence[str], tokens: Sequence[Sequence[int]], how: Sampling) -> list[list[int]]:
    """New tokens of each text, which are drawn by its name."""
    width = max(map(len, tokens))
    # Padding on the left, hidden by the mask; which token stands there does not matter.
    ids = np.full((len(tokens), width), scorer.start_token.id or 0, dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, one in enumerate(tokens):
        ids[row, width - len(one) :] = one
        mask[row, width - len(one) :] = 1
    ends = _ends(scorer)
    device = torch.device(scorer.device or "cpu")
    inputs = {"input_ids": torch.from_numpy(ids).to(device), "attention_mask": torch.from_numpy(mask).to(device)}
    draws = np.stack([_chances(name, how) for name in names])
    model: Any = scorer.model
    processors: list[LogitsProcessor] = []
    if hasattr(model, "at_decoding"):
        # A method that changes the distribution of the next token, such as self-debiasing.
        processors.append(model.at_decoding(inputs["attention_mask"]))
        model = model.base
    processors.append(_Draw(torch.from_numpy(draws).to(device), width, how))
    config = GenerationConfig(
        do_sample=False,  # the likeliest token, of which `_Draw` leaves one
        max_new_tokens=how.max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else scorer.start_token.id or 0,
    )
    with quiet(scorer.model), _settings_of_its_own(model):
        whole = model.generate(**inputs, generation_config=config, logits_processor=LogitsProcessorList(processors))
    return [list(takewhile(lambda token: token not in ends, new)) for new in whole[:, width:].tolist()]


def _chances(name: str, how: Sampling) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Numbers in [0, 1), one for each token that a prompt may get: [max_new_tokens]."""
    key = hashlib.blake2b(f"{how.seed}\n{name}".encode(errors="surrogatepass"), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(key, "little")).random(how.max_new_tokens)


class _Draw(LogitsProcessor):
    """Draws one token per row, the first at which the cumulated probability passes the row's number; hides the rest.

    The likeliest tokens come first, so that rounding between devices moves a draw as rarely as can be.
    """

    def __init__(self, chances: Tensor, width: int, how: Sampling) -> None:
        self._chances, self._width, self._how = chances, width, how

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # [B, T], [B, V] → [B, V]
        if not torch.isfinite(scores.amax(-1)).all():
            raise InputError("the model's logits are not numbers: are the weights damaged, or the precision too low?")
        token = self.choose(scores.float(), input_ids.shape[1] - self._width)
        return torch.full_like(scores, -torch.inf).scatter_(1, token[:, None], 0.0)

    def choose(self, logits: Tensor, step: int) -> Tensor:
        """[B, V] → [B]."""
        how = self._how
        if how.temperature == 0:
            return logits.argmax(-1)
        kept = min(how.top_k or logits.shape[-1], logits.shape[-1])
        top = torch.topk(logits / how.temperature, kept, dim=-1)
        probability = top.values.double().softmax(-1)
        cumulated = probability.cumsum(-1)
        # The last token kept is the one that takes the sum past top_p.
        inside = cumulated - probability < how.top_p
        mass = (probability * inside).sum(-1)
        aim = self._chances[:, step] * mass
        place = (cumulated <= aim[:, None]).sum(-1).clamp(max=inside.sum(-1) - 1)
        return top.indices.gather(1, place[:, None])[:, 0]


def _ends(scorer: Scorer) -> list[int]:
    """Tokens that end a text: the tokeniser's, and those that the model names."""
    named = getattr(getattr(scorer.model, "generation_config", None), "eos_token_id", None)
    found = [scorer.tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    return sorted({int(token) for token in found if token is not None})


@contextmanager
def _settings_of_its_own(model: Any) -> Iterator[None]:
    """Without the model's own habits (temperature, penalties): those would be filled in where ours are silent."""
    if not hasattr(model, "generate"):
        raise InputError(f"{type(model).__name__} cannot write text: transformers gives it no generate()")
    # An adapter hands its own on to the model beneath.
    both = [model, *([model.get_base_model()] if hasattr(model, "get_base_model") else [])]
    habits = [one.generation_config for one in both]
    for one in both:
        one.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for one, own in zip(both, habits, strict=True):
            one.generation_config = own
