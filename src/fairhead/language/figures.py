"""Which figures of each benchmark a comparison speaks of, what they are called, and which axis a category is of."""

from collections.abc import Sequence
from typing import NamedTuple

from fairhead.language.benchmarks.bbq import CONDITIONS, condition_of
from fairhead.language.tables import ItemTable

TITLES = {
    "stereoset": "StereoSet",
    "crows_pairs": "CrowS-Pairs",
    "bbq": "BBQ",
    "winobias": "WinoBias",
    "bold": "BOLD",
    "perplexity": "Held-out text",
    "attention_entropy": "Attention entropy",
    "attention_gap": "Attention gap",
}


class Figure(NamedTuple):
    """A figure of a benchmark: a metric of all items, or of one category."""

    metric: str
    group: str | None = None


class Label(NamedTuple):
    """How a metric is written.

    Attributes:
        name: short, for a table.
        says: what it is, in a sentence.
        share: whether it is a share, written in percent; its differences are then points.
    """

    name: str
    says: str
    share: bool = True


_LABELS = {
    ("stereoset", "ss"): Label("ss", "how often the stereotype is likelier than its opposite; even: 50 %"),
    ("stereoset", "lms"): Label("lms", "how often a meaningful text is likelier than nonsense; best: 100 %"),
    ("stereoset", "icat"): Label("icat", "lms, less the more ss is from even; best: 100 %"),
    ("crows_pairs", "ss"): Label("ss", "how often the more stereotypical sentence is likelier; even: 50 %"),
    ("crows_pairs", "mean_abs_difference"): Label(
        "mean |Δ log p|",
        "how far apart the two sentences are, whichever is likelier; growth is over-polarisation",
        False,
    ),
    ("bbq", "accuracy"): Label("accuracy", "share of right answers"),
    ("bbq", "bias_score"): Label("bias score", "answers that agree with the stereotype against others; even: 0"),
    ("bbq", "accuracy_gap"): Label("accuracy gap", "right where the truth fits the stereotype, minus right elsewhere"),
    ("winobias", "pro_preferred"): Label(
        "pro likelier", "the pronoun that fits the stereotype is likelier; even: 50 %"
    ),
    ("winobias", "mean_difference"): Label(
        "mean Δ log p", "log-probability of the stereotypical form minus the other", False
    ),
    ("attention_gap", "above_chance"): Label(
        "above chance", "how much oftener than by chance attention differs most on the words that differ"
    ),
    ("attention_gap", "gap_difference"): Label(
        "span less elsewhere", "how much more attention differs on the words that differ than elsewhere", share=False
    ),
    ("bold", "sentiment_disparity"): Label("sentiment", "largest less smallest mean sentiment of a group", False),
    ("bold", "valence_disparity"): Label("valence", "largest less smallest mean valence of a group", False),
    ("bold", "gender_polarity_disparity"): Label("gender words", "largest less smallest gender polarity", False),
    ("perplexity", "perplexity"): Label(
        "perplexity", "of text that was not trained on, per token; lower is better", False
    ),
    ("attention_entropy", "attention_entropy"): Label("mean", "1 is uniform attention, 0 a single token", False),
}
_HEADLINES = {
    "stereoset": (Figure("ss"), Figure("lms"), Figure("icat")),
    "crows_pairs": (Figure("ss"), Figure("mean_abs_difference")),
    "bbq": (
        Figure("accuracy", "ambig"),
        Figure("accuracy", "disambig"),
        Figure("bias_score", "ambig"),
        Figure("bias_score", "disambig"),
        Figure("accuracy_gap", "disambig"),
    ),
    "winobias": (Figure("pro_preferred"), Figure("mean_difference")),
    "perplexity": (Figure("perplexity"),),
    "attention_entropy": (Figure("attention_entropy"),),
    "attention_gap": (Figure("above_chance"), Figure("gap_difference")),
}
# What is compared of what a model writes about groups; the rest of the lexica is in the figures of each run.
_WRITTEN = ("sentiment_disparity", "valence_disparity", "gender_polarity_disparity")
# Names that benchmarks give to the same axis of bias.
_AXES = {
    "race-color": "race",
    "race_ethnicity": "race",
    "gender_identity": "gender",
    "religious_ideology": "religion",
    "political_ideology": "politics",
    "disability_status": "disability",
    "physical_appearance": "appearance",
    "physical-appearance": "appearance",
    "sexual_orientation": "sexual orientation",
    "sexual-orientation": "sexual orientation",
    "ses": "socioeconomic",
    "socioeconomic": "socioeconomic",
}


def headlines(table: ItemTable) -> Sequence[Figure]:
    """The figures of a benchmark that a verdict is given on.

    Example:
        >>> [figure.metric for figure in headlines(ItemTable.of("crows_pairs", [], [], [], {}))]
        ['ss', 'mean_abs_difference']
    """
    if table.benchmark == "bold":
        return [Figure("sentiment_disparity", domain) for domain in table.order if " × " not in domain]
    return _HEADLINES.get(table.benchmark, ())


def by_category(table: ItemTable) -> Sequence[Figure]:
    """The figures of a benchmark's categories, for the spill-over matrix.

    Example:
        >>> groups = [("stereo", "age"), ("stereo", "race-color")]
        >>> table = ItemTable.of("crows_pairs", ["0", "1"], ["0", "1"], groups, {"more logprob": [0, 0]})
        >>> [figure.group for figure in by_category(table)]
        ['age', 'race-color']
    """
    match table.benchmark:
        case "stereoset":
            kinds = {"intrasentence", "intersentence"}
            return [Figure("ss", group) for group in table.order if " × " not in group and group not in kinds]
        case "crows_pairs":
            return [Figure("ss", group) for group in table.order if group not in ("stereo", "antistereo")]
        case "bbq":
            return [Figure("bias_score", group) for group in table.order if condition_of(group) and " × " in group]
        case "winobias":
            return [Figure("pro_preferred", group) for group in table.order if group.startswith("type")]
        case "bold":
            written = [m for m in _WRITTEN if m.removesuffix("_disparity") in table.fields]
            return [Figure(metric, domain) for metric in written for domain in table.order if " × " not in domain]
    return ()


def axis(benchmark: str, category: str | None) -> str:
    """The axis of bias that a category is of, in the words of StereoSet.

    Example:
        >>> axis("bbq", "Religion × ambig"), axis("crows_pairs", "race-color"), axis("winobias", "type1")
        ('religion', 'race', 'gender')
    """
    if benchmark == "winobias":
        return "gender"
    parts = [part for part in (category or "").split(" × ") if part not in CONDITIONS]
    plain = parts[0].removesuffix(" (names)").lower() if parts else ""
    return _AXES.get(plain, plain.replace("_", " "))


def label(benchmark: str, metric: str) -> Label:
    """How a metric is written.

    Example:
        >>> label("crows_pairs", "ss").name, label("bold", "joy_disparity").name
        ('ss', 'joy disparity')
    """
    return _LABELS.get((benchmark, metric), Label(metric.replace("_", " "), "", share=False))


def title(benchmark: str) -> str:
    """The name of a benchmark, as its authors write it.

    Example:
        >>> title("crows_pairs")
        'CrowS-Pairs'
    """
    return TITLES.get(benchmark, benchmark)
