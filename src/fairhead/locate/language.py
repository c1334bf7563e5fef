"""Which heads of a causal language model carry its stereotype log-odds, and what happens without them.

Heads are chosen on one half of the pairs (whole clusters of them); every figure that is reported comes from the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.errors import InputError
from fairhead.language.scorer import Scorer
from fairhead.locate.ablation import layer_matched
from fairhead.locate.edits import TextEdits, check_text_kind
from fairhead.locate.effects import Curves
from fairhead.locate.head_features import Array
from fairhead.locate.head_maps import Head, HeadMap, score_pairs, top_heads
from fairhead.locate.log_odds import PairTerms, encoded_texts, whole
from fairhead.locate.pair_studies import (
    CategoryPart,
    PairBench,
    PairStudy,
    Progress,
    Statistics,
    direct_study,
    parts_by_category,
    texts_of,
)
from fairhead.locate.pairs import TextPairs
from fairhead.locate.plan import halves

POLES = ("stereotype", "anti-stereotype")
PairRank = Literal["gap", "effect"]
_EXTREMES = 3
_FEW = 50


@dataclass(frozen=True)
class PairPlan:
    """How heads are chosen and tested.

    Attributes:
        count: heads to choose at most.
        per_layer: of one layer at most; None for a quarter of its heads, so that enough are left as controls.
        rank: "gap" (direct part in the log-odds) or "effect" (log-odds lost when the head alone is edited in a true
            forward pass: layers × heads passes over all pairs).
        alpha: chance of a false choice, over all heads.
        kinds: edits of the chosen heads: "mean", "zero", "resample". The first is that of single heads and curves.
        forward: make true forward passes.
        draws: control sets, unless all are fewer.
        tf32: forward passes multiply in TF32 on GPUs that can; how far that moves the log-odds is noted.
        how: of intervals; its seed is also that of halves, controls and resampling.

    Example:
        >>> PairPlan(count=2).kinds
        ('mean', 'zero', 'resample')
    """

    count: int = 4
    per_layer: int | None = None
    rank: PairRank = "gap"
    alpha: float = 0.05
    kinds: tuple[str, ...] = ("mean", "zero", "resample")
    forward: bool = True
    draws: int = 200
    tf32: bool = False
    how: Statistics = field(default_factory=Statistics)

    def __post_init__(self) -> None:
        if self.rank not in ("gap", "effect"):
            raise InputError(f"rank is {self.rank!r}; for pairs of texts it is gap or effect")
        if self.rank == "effect" and not self.forward:
            raise InputError("heads can be ranked by their effect only with forward passes (--forward)")
        if self.count < 1 or self.draws < 1:
            raise InputError(f"count is {self.count} and draws is {self.draws}; at least 1 of each is needed")
        for kind in self.kinds:
            check_text_kind(kind)


class ExtremePairs(NamedTuple):
    """The reported pairs that a head moves most towards the first pole, and towards the second, by position."""

    head: Head
    first: tuple[int, ...]
    second: tuple[int, ...]


@dataclass(frozen=True)
class LocatedPairs:
    """What `locate_pairs` finds. Figures are of the reporting half, log-odds of the first pole against the second.

    Attributes:
        benchmark: its name.
        poles: which text is set against which; the anti-stereotype first where the choosing half prefers it.
        head_map: each head's direct part in the mean log-odds, the chosen heads marked.
        other_map: parts of the embedding and the MLPs, [1, M].
        sums: mean log-odds by heads, embedding and MLPs, biases and entropy.
        effect_map: log-odds lost when each head alone is edited in a forward pass; None unless ranked by it.
        ranked: the chosen heads, best first.
        studies: effects of editing them; empty where none was chosen.
        curves: of forward passes of the first kind; None without those.
        by_category: the chosen heads' direct part by category.
        extremes: pairs at the ends of each chosen head.
        edits: what was learned on the choosing half.
        choosing: the pairs of that half, [n] bool.
        notes: what should be known, in sentences.
        chosen_here: whether the heads were chosen on the choosing half, or named by whoever asked.
    """

    benchmark: str
    poles: tuple[str, str]
    head_map: HeadMap
    other_map: HeadMap
    sums: dict[str, float]
    effect_map: HeadMap | None
    ranked: tuple[Head, ...]
    studies: tuple[PairStudy, ...]
    curves: Curves | None
    by_category: tuple[CategoryPart, ...]
    extremes: tuple[ExtremePairs, ...]
    edits: TextEdits
    choosing: NDArray[np.bool_]
    notes: tuple[str, ...]
    chosen_here: bool = True


def halves_of_pairs(pairs: TextPairs, seed: int = 0) -> NDArray[np.bool_]:
    """The choosing half, [n] bool: whole clusters, drawn at random.

    Raises:
        InputError: there are too few clusters to halve.

    Example:
        >>> from fairhead.data.crows_pairs import CrowsPair
        >>> from fairhead.locate.pairs import pairs_of
        >>> pairs = [CrowsPair(str(i), f"She {i}.", f"He {i}.", "stereo", "gender", ()) for i in range(6)]
        >>> int(halves_of_pairs(pairs_of(pairs)).sum())
        3
    """
    clusters = len(np.unique(pairs.clusters))
    if clusters < 4:
        raise InputError(
            f"{len(pairs)} pairs in {clusters} independent clusters; at least 4 are needed for two halves: use more"
        )
    return halves(np.zeros(len(pairs), dtype=np.intp), pairs.clusters, seed)


def locate_pairs(
    scorer: Scorer,
    pairs: TextPairs,
    terms: PairTerms,
    *,
    heads: Sequence[Head] | None = None,
    plan: PairPlan | None = None,
    progress: Progress | None = None,
) -> LocatedPairs:
    """Find the heads that carry a model's stereotype log-odds, and say what happens without them.

    Args:
        scorer: the model.
        pairs: n pairs of texts.
        terms: their log-odds taken apart (`take_apart`).
        heads: those to test, best first, where they are known; None chooses them.
        plan: how.
        progress: called with (stage, texts done, texts).

    Raises:
        InputError: too few pairs.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
        >>> from fairhead.data.crows_pairs import CrowsPair
        >>> from fairhead.locate.log_odds import take_apart
        >>> from fairhead.locate.pairs import pairs_of
        >>> vocabulary = {word: i for i, word in enumerate(["<s>", "she", "he", *(f"w{k}" for k in range(20))])}
        >>> words = Tokenizer(models.WordLevel(vocabulary, "<s>"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=23, n_embd=8, n_layer=2, n_head=4, bos_token_id=0))
        >>> scorer = Scorer(model.eval(), PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>"))
        >>> pairs = pairs_of([CrowsPair(str(k), f"she w{k}", f"he w{k}", "stereo", "gender", ()) for k in range(20)])
        >>> found = locate_pairs(scorer, pairs, take_apart(scorer, pairs), heads=[Head(1, 2)])
        >>> found.head_map.gap.shape, [(study.kind, study.way) for study in found.studies][-1]
        ((2, 4), ('resample', 'forward'))
    """
    plan = plan or PairPlan()
    how = plan.how
    choosing = halves_of_pairs(pairs, how.seed)
    choose, report = np.flatnonzero(choosing), np.flatnonzero(~choosing)
    sequences = encoded_texts(scorer, pairs)
    edits = TextEdits.learn_texts(scorer, texts_of(sequences, pairs, choose), how.seed)
    # Seen from the pole that the choosing half prefers, so that a fall always means a smaller gap.
    sign = -1.0 if float(pairs.weights[choose] @ terms.log_odds[choose]) < 0 else 1.0
    poles = POLES if sign > 0 else POLES[::-1]
    terms = terms.times(sign)
    bench = PairBench(scorer, pairs, sequences, edits, sign, how, progress, plan.tf32)
    by_effect = plan.rank == "effect" and heads is None

    def direct_map(parts: Array, rows: NDArray[np.intp]) -> HeadMap:
        part = pairs.take(rows)
        return score_pairs(
            parts[rows],
            terms.log_odds[rows],
            weights=part.weights,
            clusters=part.clusters,
            names=poles,
            level=how.level,
            measure=f"direct part in the log-odds, {poles[0]} minus {poles[1]}",
        )

    if heads is None:
        chooser = (
            bench.effect_map(choose, terms.shape, plan.kinds[0], poles)
            if by_effect
            else direct_map(terms.heads, choose)
        )
        per_layer = plan.per_layer or max(1, terms.shape[1] // 4)
        # Log-odds of the choosing half are positive by the choice of poles.
        ranked = top_heads(chooser.gap, chooser.p_adjusted, plan.count, plan.alpha, per_layer)
    else:
        ranked = tuple(Head(*head) for head in heads)
    marked = tuple(sorted(ranked))
    kept, judged = terms.take(report), pairs.take(report)
    effect_map = bench.effect_map(report, terms.shape, plan.kinds[0], poles).marking(marked) if by_effect else None
    studies: list[PairStudy] = []
    curves = None
    if ranked:
        controls = layer_matched(ranked, terms.shape[1], draws=plan.draws, seed=how.seed)
        for kind in plan.kinds:
            if kind != "resample":  # whose direct effect would need every token's own output
                studies.append(direct_study(kept, judged, ranked, controls, kind, edits.means, how))
        for kind in plan.kinds if plan.forward else ():
            study, dose = bench.forward(report, ranked, controls, kind)
            studies.append(study)
            curves = curves or dose
    return LocatedPairs(
        benchmark=pairs.name,
        poles=poles,
        head_map=direct_map(terms.heads, report).marking(marked),
        other_map=direct_map(terms.others[:, None], report),
        sums={name: float(judged.weights @ values) for name, values in whole(kept)},
        effect_map=effect_map,
        ranked=ranked,
        studies=tuple(studies),
        curves=curves,
        by_category=parts_by_category(kept, judged, ranked, how.level),
        extremes=tuple(_extremes(head, terms.heads[report, head.layer, head.head], report) for head in ranked),
        edits=edits,
        choosing=choosing,
        notes=_notes(plan, bench, report, kept),
        chosen_here=heads is None,
    )


def _notes(plan: PairPlan, bench: PairBench, report: NDArray[np.intp], kept: PairTerms) -> tuple[str, ...]:
    notes = [f"{len(report)} reported pairs are few: expect wide intervals."] if len(report) < _FEW else []
    if bench.in_tf32 and plan.forward:
        (plain,) = bench.columns(report, [()], plan.kinds[0])
        off = np.abs(plain[:, 1] / plain[:, 0] - kept.log_odds)
        notes.append(
            "Forward passes ran in TF32: the log-odds of the model as it is differ from those in float32 by "
            f"{off.mean():.1g} nats a pair on average, {off.max():.1g} at most."
        )
    return tuple(notes)


def _extremes(head: Head, parts: Array, rows: NDArray[np.intp]) -> ExtremePairs:
    order = rows[np.argsort(parts, kind="stable")]
    return ExtremePairs(head, tuple(order[::-1][:_EXTREMES].tolist()), tuple(order[:_EXTREMES].tolist()))
