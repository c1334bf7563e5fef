"""What `locate` is asked, as settings: `fairhead.locate`, `fairhead locate` and `fairhead ablate` take these.

Imports nothing heavy: the options of the commands are made of these classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, get_args

from fairhead.errors import InputError
from fairhead.settings import PYTHON_ONLY, Count, Level, Option, Replicates, Seed, Share, WholeNumber

Rank = Literal["effect", "gap", "concept", "bias", "ranksum"]
RANKS: tuple[str, ...] = get_args(Rank)
_MODEL, _TEXT, _CHOICE = "Model", "Text side, for pictures", "Choice of heads"


@dataclass(frozen=True)
class Source:
    """What a question is about. In Python, the model may be a live one; saving an edit then bakes it into that.

    Attributes:
        data: as reader:path: pictures (fairface, celeba, utkface, images), texts (hatexplain, texts), or pairs of
            sentences (crows, stereoset, pairs, triplets).
        model: an image model, a text classifier or a causal language model: a folder, or a hub name in the local cache
            (hub:NAME downloads it).
        concept: for pairs, use only this type of bias (default: all). For pictures and texts, the same as --group: a
            column, gender or age of published faces, an attribute in --prompts, or a community that posts are about.
        task: column of the classes; the same as --label.
        against: another model of the same shape, such as a mitigated one; shows both head maps and a test for each
            head.
        limit: use only this many rows (drawn evenly over groups) or pairs.
        prompts: YAML file of prompts.
        text_adapter: linear replacement for a text encoder (.npz with B, x_mean), for models without one.
        text_encoder: folder of the encoder that belongs to the adapter.
        texts: texts for TextSpan (.npz with texts, vectors).
        concept_from: source of the group direction; auto uses prompts if there is a text encoder, otherwise leace.
        orthogonal: remove the class directions from the concept.
        calibrate: predict each zero-shot class as often as it occurs in the selection half.
        terms: how to attribute biases and the centring of the final layer norm: own centres each head and keeps biases
            separate; prs distributes both equally over the heads, as the published decomposition of CLIP does.
        evidence: class whose evidence to analyse; the default is the class with the largest gap.
        tokens: tokens at which forward passes edit heads: all, as in a saved model, or only the first.
        batch_size: rows per batch.
        device: device: cpu, cuda, cuda:1, ...; auto uses a GPU if there is one.
        start: for pairs, the token that texts start with: bos, eos, none or a token; the default is BOS, or EOS if
            there is no BOS.
        tf32: run forward passes in TF32 on a GPU, which is several times as fast.
        seed: seed of the sample and of the halves.
        options: options of the data reader.
        beside: tokenizer or image processor of a model object that was not loaded from a folder.
    """

    model: Annotated[Any, Option(metavar="PATH", panel=_MODEL)]
    data: Annotated[str, Option(metavar="SPEC")]
    concept: Annotated[str | None, Option(metavar="NAME")] = None
    task: Annotated[str | None, Option(metavar="COLUMN", hidden=True)] = None
    against: Annotated[str | None, Option(metavar="PATH", panel=_MODEL)] = None
    limit: Annotated[Count | None, Option(metavar="N")] = None
    prompts: Annotated[str | None, Option(metavar="FILE", panel=_TEXT)] = None
    text_adapter: Annotated[str | None, Option(metavar="FILE", panel=_TEXT)] = None
    text_encoder: Annotated[str | None, Option(metavar="PATH", panel=_TEXT)] = None
    texts: Annotated[str | None, Option(metavar="FILE", panel=_TEXT)] = None
    concept_from: Annotated[Literal["auto", "prompts", "means", "logistic", "leace"], Option(panel=_TEXT)] = "auto"
    orthogonal: Annotated[bool, Option(panel=_TEXT)] = False
    calibrate: Annotated[bool, Option(panel=_TEXT)] = False
    terms: Annotated[Literal["own", "prs"], Option(panel=_MODEL)] = "own"
    evidence: Annotated[str | None, Option("--class", "CLASS", panel=_CHOICE)] = None
    tokens: Annotated[Literal["all", "first"], Option(panel=_CHOICE)] = "all"
    batch_size: Annotated[Count, Option(metavar="N", panel=_MODEL)] = 32
    device: Annotated[str, Option(panel=_MODEL)] = "auto"
    start: Annotated[str, Option(metavar="TOKEN", panel=_MODEL)] = "default"
    tf32: Annotated[bool, Option(panel=_MODEL)] = False
    seed: Annotated[Seed, PYTHON_ONLY] = 0
    options: Annotated[Mapping[str, Any], PYTHON_ONLY] = field(default_factory=dict)
    beside: Annotated[Any, PYTHON_ONLY] = None
    panel: ClassVar[str] = "Data"

    @property
    def called(self) -> str:
        """What the model is called: its folder or name, or the class of a live one."""
        return self.model if isinstance(self.model, str) else type(self.model).__name__

    @property
    def kind(self) -> str:
        """Of the data: "images", "texts" or "pairs".

        Example:
            >>> Source("model", "crows:pairs.csv").kind, Source("model", "fairface:FairFace.zip").kind
            ('pairs', 'images')
        """
        from fairhead.data import parse_spec

        kind = parse_spec(self.data, "images", "texts", "pairs", "triplets").reader.kind
        return "pairs" if kind == "triplets" else kind


@dataclass(frozen=True)
class LocatePlan:
    """How heads are chosen and tested.

    Attributes:
        count: maximum number of heads to select.
        per_layer: maximum per layer; None is a quarter of its heads, which leaves enough as controls.
        rank: how to rank heads. effect: how much the gap shrinks when this head alone is edited in a full forward pass.
            gap: the head's direct contribution, which misses effects through later layers. Between groups also concept
            (how well a head separates the groups along the concept), bias (that times its coupling with the class
            evidence) and ranksum (the ranks of both and of the share of the attribute's texts in the head's output;
            needs --texts). The default is effect; for pairs of texts without a GPU, gap.
        exact: number of heads whose effect is computed in forward passes; all others are estimated from gradients
            (attribution patching) and cannot be selected. The default is all heads on a GPU, otherwise 16.
        alpha: error rate of the selection: the false discovery rate between groups, the family-wise error in pairs.
        kinds: edits of the selected heads; None for all that apply. The first is used for curves; single heads are
            edited by the first of mean, zero and resample among them (else mean): an edit fitted to the groups of the
            selection half would find an effect there in noise.
        forward: also edit the selected heads in full forward passes.
        target: also find the cheapest edit that reduces the gap to this share of it, such as 0.5, over kinds, strengths
            and numbers of the selected heads, on a GPU also gains learned with the groups; ablate --kind gain learns
            its gains for the target.
        target_metric: the gap that --target refers to.
        draws: number of control sets of heads, or all if there are fewer.
        m: texts per head in TextSpan.
        permutations: permutations behind the p-value of a head's texts.
        extremes: rows shown at either end of a head.
        n_boot: bootstrap replicates.
        level: confidence level.
        seed: same seed, same figures.

    Example:
        >>> LocatePlan(count=2, kinds=("mean",)).draws
        200
    """

    count: Annotated[Count, Option("--heads", "N", panel=_CHOICE)] = 4
    per_layer: Annotated[Count | None, PYTHON_ONLY] = None
    rank: Annotated[Rank | None, Option(panel=_CHOICE)] = None
    exact: Annotated[Count | None, Option(metavar="N", panel=_CHOICE)] = None
    alpha: Annotated[float, PYTHON_ONLY] = 0.05
    kinds: Annotated[tuple[str, ...] | None, PYTHON_ONLY] = None
    forward: Annotated[bool, Option(panel=_CHOICE)] = False
    target: Annotated[Share | None, Option(metavar="SHARE", panel=_CHOICE)] = None
    target_metric: Annotated[Literal["EOd", "DP", "cramers_v", "cramers_v_corrected"], Option(panel=_CHOICE)] = "EOd"
    draws: Annotated[Count, Option(metavar="N")] = 200
    m: Annotated[Count, PYTHON_ONLY] = 20
    permutations: Annotated[Count, PYTHON_ONLY] = 2000
    extremes: Annotated[Count | None, PYTHON_ONLY] = None
    n_boot: Annotated[Replicates, Option(metavar="N")] = 2000
    level: Annotated[Level, PYTHON_ONLY] = 0.95
    seed: Annotated[Seed, Option(metavar="N")] = 0
    panel: ClassVar[str] = "Statistics"

    def __post_init__(self) -> None:
        if self.rank not in (None, *RANKS):
            raise InputError(f"rank is {self.rank!r}; expected one of {', '.join(RANKS)}")
        if self.count < 1 or self.draws < 1:
            raise InputError(f"count is {self.count} and draws is {self.draws}; at least 1 of each is needed")

    @property
    def share_left(self) -> float:
        """The share of the gap that an edit may leave: the target, or half of it."""
        return 0.5 if self.target is None else self.target


@dataclass(frozen=True)
class AttentionPlan:
    """Which rows, tokens and pictures `fairhead attention` looks at.

    Attributes:
        groups: two groups of the column; the default is the two largest.
        part: part of the data.
        limit: use at most this many rows, drawn at random.
        layer: attention layer; -1 is the last.
        token: token whose q and k to show; 0 is the first.
        dimension: dimension of q or k to draw, as q:HEAD:NUMBER; the default is the most unusual one. Repeat it for
            several.
        pictures: number of pictures with attention maps, equally many for each group.
        picture: id of a picture to show instead; repeat it for several.
        max_length: length in tokens to which texts are truncated and padded.
        seed: seed of the sample.
        device: device: cpu, cuda, cuda:1, ...; auto uses a GPU if there is one.
    """

    groups: Annotated[str | None, Option(metavar="A,B")] = None
    part: Annotated[str, Option(metavar="NAME")] = "test"
    limit: Annotated[Count, Option(metavar="N")] = 2000
    layer: Annotated[int, Option(metavar="N")] = -1
    token: Annotated[int, Option(metavar="N")] = 0
    dimension: Annotated[tuple[str, ...], Option(metavar="SIDE:HEAD:NUMBER")] = ()
    pictures: Annotated[WholeNumber, Option(metavar="N")] = 6
    picture: Annotated[tuple[str, ...], Option(metavar="ID")] = ()
    max_length: Annotated[Count, Option(metavar="N")] = 128
    seed: Annotated[Seed, Option(metavar="N")] = 0
    device: str = "auto"

    @property
    def dimensions(self) -> "tuple[tuple[Literal['q', 'k'], int, int], ...]":
        """Side, head and number of each dimension to draw."""
        return tuple(_dimension(text) for text in self.dimension)


def _dimension(text: str) -> "tuple[Literal['q', 'k'], int, int]":
    side, *numbers = text.split(":")
    if side not in ("q", "k") or len(numbers) != 2 or not all(n.isdigit() for n in numbers):
        raise InputError(f"--dimension is {text!r}; expected q or k, head and number, such as q:0:5")
    return "q" if side == "q" else "k", int(numbers[0]), int(numbers[1])
