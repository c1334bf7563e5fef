"""Where attention parts ways between a stereotyped sentence and its counterpart: on the words that differ?

KLAAD's motivation: in a pair of sentences, is the token whose attention differs most one of those that carry the bias?
`attention_reading.read_gaps` reads a model; this file makes figures of what it read, and needs no torch.

Read the answer with care. Tokens that differ have keys that differ, in any model and for any words: that attention to
them differs most is no proof of bias. What tells something is how the figures compare, between models, heads or kinds
of bias.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from fairhead.errors import InputError
from fairhead.language.answers import text_digest
from fairhead.language.benchmark import (
    ASKS,
    SHOWS,
    Benchmark,
    BenchmarkResult,
    Figure,
    Label,
    Measure,
    Measured,
    SentencePair,
    Work,
    of_terms,
)
from fairhead.language.benchmarks import benchmark_of
from fairhead.language.benchmarks.crows_pairs import read_crows_pairs
from fairhead.language.item_table import ItemTable
from fairhead.report.wording import number, signed
from fairhead.settings import Option, WholeNumber
from fairhead.stats import Estimate, adjust, p_text
from fairhead.stats.bootstrap import Array, Resampling
from fairhead.stats.clusters import cluster_means
from fairhead.stats.paired import permutation_p

if TYPE_CHECKING:
    from fairhead.language.attention_reading import PairGaps
    from fairhead.report.page import Sentence
    from fairhead.report.sections import Section
    from fairhead.report.sections.plain import PlainTables

EQUAL, UNEQUAL = "equal length", "unequal length"


@dataclass(frozen=True)
class Options:
    """Of the attention gap.

    Attributes:
        layer: layer to report first; -1 is the last.
        average: average over heads and queries before or after taking the absolute difference.
        counts_start_token: include the start token.
        pictures: number of single pairs to show.
    """

    layer: Annotated[int, ASKS, Option(metavar="N")] = -1
    average: Annotated[Literal["before", "after"], ASKS] = "before"
    counts_start_token: Annotated[bool, ASKS, Option("--start-token")] = True
    pictures: Annotated[WholeNumber, SHOWS, Option(metavar="N")] = 6


def sentence_pairs(items: Sequence[Any]) -> list[SentencePair]:
    """The items of a benchmark that has pairs of sentences, such as CrowS-Pairs or StereoSet, as such pairs."""
    benchmark = benchmark_of(items)
    if benchmark.pairs is None:
        raise InputError(f"{benchmark.title} has no pairs of sentences; CrowS-Pairs or StereoSet has")
    return benchmark.pairs(items)


def table(gaps: "PairGaps", layer: int = -1) -> ItemTable:
    """One row per pair, with the gaps of one layer averaged over heads; by default the last, as in the paper."""
    hit, on, off = (values[:, _number(gaps, layer)] for values in gaps.of_layers())
    both = zip(gaps.pairs, gaps.tokens, strict=True)
    groups = [(*pair.groups, EQUAL if tokens.equal_length else UNEQUAL) for pair, tokens in both]
    kinds = sorted({group for pair in gaps.pairs for group in pair.groups})
    return ItemTable.of(
        "attention_gap",
        [pair.id for pair in gaps.pairs],
        [pair.cluster for pair in gaps.pairs],
        groups,
        {"hit": hit, "chance": gaps.chance, "on": on, "off": off},
        order=[EQUAL, UNEQUAL, *kinds],
        left_out=gaps.left_out,
        texts=[text_digest(pair.first) for pair in gaps.pairs],
    )


def study(gaps: "PairGaps", options: Options, how: Resampling, n_perm: int = 2000) -> dict[str, Any]:
    """What a table does not hold: tests, every layer, every head, and single pairs.

    By name: `layer`, the layer that the estimates and tests are of; `tests` of "above_chance" and
    "gap_difference" over all pairs, by Student's t and against spans moved elsewhere in each sentence; `layers`, every
    layer's gaps, averaged over heads; `heads`, [layers][heads] each, how much more often than by chance a head's
    largest gap is on the span; and `pairs`: single pairs, token by token, those with the largest gap relative to the
    others of their sentence, of each kind of bias in turn.
    """
    layer, chance, clusters = _number(gaps, options.layer), gaps.chance, [pair.cluster for pair in gaps.pairs]
    hit, on, off = gaps.of_layers()
    means = cluster_means(hit - chance[:, None], clusters, how.level)
    by_layer = np.column_stack([means.value, means.low, means.high, on.mean(0), off.mean(0)])
    names = ("above_chance", "low", "high", "gap_on_span", "gap_elsewhere")
    heads = cluster_means((gaps.hit - chance[:, None, None]).reshape(len(chance), -1), clusters, how.level)
    adjusted = np.array(adjust([None if np.isnan(p) else float(p) for p in heads.p], "holm"), dtype=np.float64)
    grids = {"value": heads.value, "low": heads.low, "high": heads.high, "p_adjusted": adjusted}
    by_chance = _shifted(gaps, layer, n_perm, how.seed)
    observed = {"above_chance": hit[:, layer] - chance, "gap_difference": on[:, layer] - off[:, layer]}
    return {
        "layer": layer,
        "tests": {name: _tested(v, clusters, by_chance[name]) for name, v in observed.items()},
        "layers": [{"layer": i, **dict(zip(names, row, strict=True))} for i, row in enumerate(by_layer.tolist())],
        "heads": {
            name: [[None if np.isnan(v) else float(v) for v in row] for row in values.reshape(-1, gaps.hit.shape[2])]
            for name, values in grids.items()
        },
        "pairs": [_picture(gaps, i, layer) for i in _telling(gaps, layer, options.pictures)],
    }


def _number(gaps: "PairGaps", layer: int) -> int:
    layers = gaps.hit.shape[1]
    if not -layers <= layer < layers:
        raise InputError(f"layer {layer} does not exist: the model has {layers} attention layers")
    return layer % layers


def _tested(values: Array, clusters: Sequence[str], by_chance: Array) -> dict[str, float | None]:
    """A one-sided test that a mean is above 0; t and p are None where every pair has the same value."""
    found = cluster_means(values[:, None], clusters)
    mean, t, p = (None if np.isnan(part[0]) else float(part[0]) for part in (found.value, found.t, found.p))
    by_permutation = permutation_p(float(found.value[0]), by_chance)
    return {"mean": mean, "t": t, "p": p, "p_permutation": by_permutation, "n": len(values)}


def _shifted(gaps: "PairGaps", layer: int, n_perm: int, seed: int) -> dict[str, Array]:
    """Means over pairs, [n_perm], with each pair's span moved round its sentence by a random number of places."""
    from fairhead.language.attention_reading import largest_on

    longest = max(len(tokens.changed) for tokens in gaps.tokens)
    hit, apart = np.zeros((2, len(gaps.tokens), longest))
    for i, tokens in enumerate(gaps.tokens):
        values = tokens.by_layer[layer]
        moved = np.stack([np.roll(tokens.changed, shift) for shift in range(len(values))])
        hit[i, : len(values)] = [float(largest_on(values, one)) for one in moved]
        apart[i, : len(values)] = [values[one].mean() - values[~one].mean() for one in moved]
    lengths = np.array([len(tokens.changed) for tokens in gaps.tokens])
    rng = np.random.default_rng(seed)
    block = max(1, (1 << 20) // len(lengths))
    found: list[tuple[Array, Array]] = []
    for begin in range(0, n_perm, block):
        drawn = rng.integers(lengths, size=(min(block, n_perm - begin), len(lengths))).T
        above, difference = (np.take_along_axis(values, drawn, 1).mean(0) for values in (hit, apart))
        found.append((above - float(gaps.chance.mean()), difference))
    means = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return dict(zip(("above_chance", "gap_difference"), means, strict=True))


def _telling(gaps: "PairGaps", layer: int, count: int) -> list[int]:
    """Pairs to show: the largest gap against the mean of its sentence, one of each kind of bias after the other."""
    contrast = [t.by_layer[layer].max() / max(t.by_layer[layer].mean(), 1e-12) for t in gaps.tokens]
    kinds: dict[str, list[int]] = {}
    for i in sorted(range(len(contrast)), key=lambda i: -contrast[i]):
        kinds.setdefault(gaps.pairs[i].groups[0] if gaps.pairs[i].groups else "", []).append(i)
    chosen: list[int] = []
    while len(chosen) < min(count, len(contrast)):
        chosen += [members.pop(0) for members in kinds.values() if members]
    return chosen[:count]


def _picture(gaps: "PairGaps", i: int, layer: int) -> dict[str, Any]:
    pair, tokens = gaps.pairs[i], gaps.tokens[i]
    return {
        "id": pair.id,
        "groups": list(pair.groups),
        "texts": [pair.first, pair.second],
        "first": list(tokens.first),
        "second": list(tokens.second),
        "changed": tokens.changed.tolist(),
        "gaps": tokens.by_layer[layer].tolist(),
    }


_CAREFUL = (
    "Tokens that differ have keys that differ, in any model and for any words, so that attention differs most on them "
    "is no proof of bias. What tells something is how the figure compares between models, heads and kinds of bias."
)


def verdict(gap: BenchmarkResult, level: float) -> "list[Sentence]":
    """What was found, in sentences with a tone."""
    from fairhead.report.page import Sentence

    share, chance, above = (gap[name] for name in ("largest_on_span", "chance", "above_chance"))
    if share.value is None or chance.value is None:
        return [Sentence(f"Nothing can be said: {share.undefined}.", "unclear")]
    test = gap.more["tests"]["above_chance"]
    known = above.low is not None and above.low > 0
    found = (
        f"In layer {gap.more['layer']} attention differs most on the words that differ in {share.value:.1%} of {gap.n} "
        f"pairs; by chance it would in {chance.value:.1%}."
    ).replace("%", " %")
    moved = f"against spans moved elsewhere in each sentence {p_text(test['p_permutation'])}"
    student = "" if test["t"] is None or test["p"] is None else f"t = {number(test['t'], 2)}, {p_text(test['p'])}; "
    on, off = gap["gap_on_span"], gap["gap_elsewhere"]
    return [
        Sentence(found, "note" if known else "unclear"),
        Sentence(f"One-sided tests: {student}{moved}.", "note" if known else "unclear"),
        Sentence(f"The mean gap is {_figure(on)} on those words and {_figure(off)} elsewhere.", "note"),
        Sentence(_CAREFUL, "note"),
    ]


def _figure(estimate: Estimate) -> str:
    interval = "" if estimate.low is None else f" ({number(estimate.low, 5)} to {number(estimate.high, 5)})"
    return f"{number(estimate.value, 5)}{interval}"


def page_sections(gap: BenchmarkResult, level: float) -> "list[Section]":
    """How often the largest gap is on the words that differ, by kind of bias, layer and head; and single pairs."""
    from fairhead.report.sections import Section

    categories = [
        {"name": e.group_by or "all pairs", "value": e.value, "low": e.low, "high": e.high, "n": e.n}
        for e in gap.estimates
        if e.metric == "above_chance" and e.value is not None
    ]
    layers = [
        {"name": f"layer {f['layer']}", "value": f["above_chance"], "low": f["low"], "high": f["high"]}
        for f in gap.more["layers"]
    ]
    caption = "Largest gap on the words that differ, above chance"
    shares = {"unit": "fraction", "ideal": 0.0}
    panels = [
        {"caption": f"{caption} (layer {gap.more['layer']})", **shares, "points": categories},
        {"caption": f"{caption}, by layer", **shares, "points": layers},
    ]
    heads = gap.more["heads"]
    found: list[dict[str, Any]] = [
        {
            "kind": "attention_gap",
            "title": "How often the largest gap is on the words that differ",
            "text": f"Intervals hold at {level:.0%}. Pairs of equal length are those whose tokens correspond one by "
            "one.",
            "panels": panels,
            "pairs": [],
        },
        {
            "kind": "headmap",
            "title": "By head",
            "text": "How much oftener than by chance the head's own largest gap is on the words that differ.",
            "measure": "above chance",
            "unit": "fraction",
            "values": heads["value"],
            **{name: heads[name] for name in ("low", "high", "p_adjusted")},
            "selected": [],
        },
        {
            "kind": "attention_gap",
            "title": "Single pairs, token by token",
            "text": "Pairs whose largest gap stands out most, of each kind of bias in turn: not a sample.",
            "panels": [],
            "pairs": gap.more["pairs"],
        },
    ]
    return [Section.from_json(one, one["title"]) for one in found]


def shown(gap: BenchmarkResult, level: float) -> "PlainTables":
    """The figures of each kind of bias, and the heads that are furthest above chance."""
    from fairhead.report.sections.plain import PlainTable, PlainTables

    rows = []
    for group in dict.fromkeys(e.group_by for e in gap.estimates):
        found = [gap[m, group] for m in ("largest_on_span", "chance", "above_chance", "gap_on_span", "gap_elsewhere")]
        hit, chance, above, on, off = found
        if any(e.value is None for e in found):
            rows.append((group or "all", "–", "–", "too few", "–", "–", str(hit.n)))
            continue
        between = (
            f"{above.value:.1%}" if above.low is None else f"{above.value:.0%} ({above.low:.0%} to {above.high:.0%})"
        )
        figures = (f"{hit.value:.1%}", f"{chance.value:.1%}", between, f"{on.value:.4f}", f"{off.value:.4f}")
        rows.append((group or "all", *figures, str(hit.n)))
    grid, adjusted = gap.more["heads"]["value"], gap.more["heads"]["p_adjusted"]
    heads = [(v, i, j) for i, row in enumerate(grid) for j, v in enumerate(row) if v is not None]
    best = ", ".join(f"L{i}H{j} {signed(100 * v, 0)} %" for v, i, j in sorted(heads, reverse=True)[:5])
    significant = sum(adjusted[i][j] is not None and adjusted[i][j] < 1 - level for _, i, j in heads)
    columns = ("", "on span", "chance", "above chance", "gap on", "off", "pairs")
    note = f"Heads furthest above chance: {best}; {significant} of {len(heads)} significantly so."
    tables = [PlainTable(caption=f"with {100 * level:g} % intervals", columns=columns, rows=rows)]
    return PlainTables(title="Attention on what differs", text=note, tables=tables)


def _measure(work: Work) -> Measured:
    from fairhead.language.attention_reading import read_gaps

    how = {"average": work.options.average, "start_token": work.options.counts_start_token}
    gaps = read_gaps(work.scorer, sentence_pairs(work.items), **how, progress=work.progress)
    return Measured(table(gaps, work.options.layer), more=partial(study, gaps, work.options))


BENCHMARK = Benchmark(
    name="attention_gap",
    command="attention",
    title="Attention gap",
    question="Where does attention differ between a stereotyped sentence and its counterpart?",
    read=lambda path, options: read_crows_pairs(path),
    measure=_measure,
    options=Options,
    data="crows_pairs",
    kinds=("pairs", "triplets"),
    section="Attention",
    trained_on=of_terms,
    # The share of pairs whose largest gap is on the span, what chance would give, and how far it is above; the mean
    # gap on the span and off it, and their difference.
    measures=(
        Measure.mean("largest_on_span", lambda found: found.column("hit")),
        Measure.mean("chance", lambda found: found.column("chance")),
        Measure.mean("above_chance", lambda found: found.column("hit") - found.column("chance"), 0.0),
        Measure.mean("gap_on_span", lambda found: found.column("on")),
        Measure.mean("gap_elsewhere", lambda found: found.column("off")),
        Measure.mean("gap_difference", lambda found: found.column("on") - found.column("off"), 0.0),
    ),
    labels={
        "above_chance": Label(
            "above chance", "how much oftener than by chance attention differs most on the words that differ"
        ),
        "gap_difference": Label(
            "span less elsewhere",
            "how much more attention differs on the words that differ than elsewhere",
            share=False,
        ),
    },
    headlines=(Figure("above_chance"), Figure("gap_difference")),
    outcomes={
        "gap_difference": {
            "better": "attention differs less between a stereotyped sentence and its counterpart",
            "worse": "attention differs more between a stereotyped sentence and its counterpart",
            "changed": "the gap has changed sides",
            "not significant": "the change of the attention gap is not significant",
        }
    },
    sentences=verdict,
    shown=shown,
    page_sections=page_sections,
    explains="""The gap of a token is how far apart the attention that it gets is in the two sentences of a pair,
averaged over heads and queries. Reported: how often the largest gap is on the words that differ, against chance; the
mean gap there and elsewhere; by kind of bias, layer and head; single pairs token by token.""",
    examples=(
        "fairhead lm attention --model hub:HuggingFaceTB/SmolLM2-135M --data crows:crows_pairs --html gap.html",
        "fairhead lm attention --model hub:HuggingFaceTB/SmolLM2-135M --data stereoset:dev.json --layer 12",
    ),
)
