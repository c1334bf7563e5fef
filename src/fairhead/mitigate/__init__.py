"""Methods that reduce a gap, a file per family, and their registry. None of them ever sees a group.

A method is one file with a frozen dataclass of settings and one line in `METHODS`: what it is for, where its settings
are, and a line of help. Another package adds one by an entry point of the group `fairhead.methods` that names a
`MethodEntry`. Methods that do see groups are in `references`. Other names are imported when first used, so that the
registry can be read without torch.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

from fairhead import entry_named, later, make_verb
from fairhead.errors import InputError, check_known
from fairhead.settings import check_settings

if TYPE_CHECKING:
    from fairhead.mitigate.dam import DAM as DAM
    from fairhead.mitigate.encoder_layer import EncoderLayer as EncoderLayer
    from fairhead.mitigate.klaad import KLAAD as KLAAD
    from fairhead.mitigate.language_trainer import LanguageTrainer as LanguageTrainer
    from fairhead.mitigate.row_weights import balance_weights as balance_weights
    from fairhead.mitigate.row_weights import draw_by_weight as draw_by_weight
    from fairhead.mitigate.row_weights import match_weights as match_weights
    from fairhead.mitigate.training_job import Job as Job
    from fairhead.mitigate.training_job import Stage as Stage
    from fairhead.mitigate.training_job import Trained as Trained
    from fairhead.mitigate.training_job import run as run
    from fairhead.mitigate.triplets import TripletData as TripletData
    from fairhead.models import attach as attach
    from fairhead.models import save as save
    from fairhead.models.load import load as load

ENTRY_POINTS = "fairhead.methods"
Kind = Literal["classifier", "language"]
# What a method is told, from inputs and labels (0) to the attribute itself (5); a level includes those below it.
LADDER = (
    "inputs and labels",
    "a public frozen encoder",
    "a deployment sample of inputs, or class names",
    "the attribute's name",
    "attribute labels on other data",
    "attribute labels here",
)


@dataclass(frozen=True)
class MethodEntry:
    """One method.

    Example:
        >>> METHODS["dro_cvar"].configure(alpha=0.5)
        DRO(form='cvar', eta=0.25, power=1.5, alpha=0.5)
    """

    name: str  # how it is called in commands, grids and tables
    settings: str  # where its dataclass is, as "module:Class"; imported when first used
    about: str  # what it does, in a line
    # Of the models that it trains: "classifier" (pictures and texts), or "language" (causal models)
    kind: Kind = "classifier"
    told: int = 0  # its level on the `LADDER`, with its settings as they are registered
    # Settings of this variant of the method, where they differ from the class's own
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.told not in range(len(LADDER)):
            levels = ", ".join(f"{level} ({words})" for level, words in enumerate(LADDER))
            raise InputError(f"method {self.name!r}: told is {self.told!r}; expected one of {levels}")

    @property
    def uses_groups(self) -> bool:
        """Whether it trains with the sensitive attribute: a reference, fenced off from the others."""
        return self.told == len(LADDER) - 1

    def load(self) -> Any:
        """The class of its settings."""
        return resolve_name(self.settings)

    def configure(self, **options: Any) -> Any:
        """Its settings, with `options` changed."""
        kind = self.load()
        for option in options:
            known = [setting.name for setting in fields(kind)]
            check_known(option, known, f"method {self.name!r} has no option {option!r}; it takes:")
        check_settings(kind, options, f"method {self.name!r}")
        # Lists come from YAML and JSON; settings are hashable.
        given = {option: tuple(value) if isinstance(value, list) else value for option, value in options.items()}
        values = {**self.options, **given}
        for setting in fields(kind):
            if setting.default is MISSING and setting.default_factory is MISSING and setting.name not in values:
                raise InputError(f"method {self.name!r} needs the option {setting.name!r}")
        return kind(**values)


def _here(name: str, place: str, about: str, told: int = 0, **options: Any) -> MethodEntry:
    return MethodEntry(name, f"fairhead.mitigate.{place}", about, told=told, options=options)


def _language(name: str, place: str, about: str) -> MethodEntry:
    return MethodEntry(name, f"fairhead.mitigate.{place}", about, kind="language")


def _reference(name: str, place: str, about: str) -> MethodEntry:
    return MethodEntry(name, f"fairhead.mitigate.references.{place}", about, told=5)


_RELEASED: dict[str, Any] = {"append": True, "first_token": "in"}
_RELEASED_FROZEN: dict[str, Any] = {"freeze": True, "divide": False, "detach_stats": True, "values": 5, "hidden": 256}
_RELEASED_TEXT: dict[str, Any] = {"norm": "after", "pick": "per_head", "first_token": "shifted", "temperature": 0.07}
_RELEASED_TEXT |= {"eps": 0.0, "mask_padding": False, "alignment_weight": 0.8}
_DRO = "hard_rows:DRO"
_REDUCE = "auto_balance_match:Reduce"

METHODS: Mapping[str, MethodEntry] = {
    entry.name: entry
    for entry in (
        _here("erm", "training_job:ERM", "plain training, the baseline"),
        _here("dam", "dam:DAM", "attention with standardised, absolute q and k; alignment loss (Lu et al., 2024)"),
        _here("dam_norm", "dam:DAM", "DAM without absolute values", absolute=False),
        _here("dam_no_alignment", "dam:DAM", "DAM without the alignment loss", alignment_weight=0),
        _here("dam_no_attention", "dam:DAM", "only DAM's alignment loss", normalise=False, absolute=False),
        _here("dam_release", "dam:DAM", "DAM as in its released code", **_RELEASED, eps=0.0, mask_padding=False),
        _here(
            "dam_release_frozen",
            "dam:DAM",
            "DAM as in its released code for frozen models",
            **_RELEASED,
            **_RELEASED_FROZEN,
        ),
        _here("dam_release_text", "dam:DAM", "DAM as in its released code for texts", append=True, **_RELEASED_TEXT),
        _here("encoder_layer", "encoder_layer:EncoderLayer", "an appended encoder layer without DAM"),
        _here("dro", _DRO, "distributionally robust training with a fixed threshold (Hashimoto et al., 2018)"),
        _here("dro_chi2", _DRO, "DRO with the exact worst case over a χ² ball", form="chi2"),
        _here("dro_cvar", _DRO, "DRO with the exact mean over the worst rows", form="cvar"),
        _here("arl", "hard_rows:ARL", "an adversary reweights rows (Lahoti et al., 2020)"),
        _here("kd", "two_stages:KD", "distillation from a teacher (Chai et al., 2022)"),
        _here("jtt", "two_stages:JTT", "just train twice: upweight the errors of a first model (Liu et al., 2021)"),
        _here("lff", "hard_rows:LfF", "learning from failure of a biased network (Nam et al., 2020)"),
        _here(
            "lff_release",
            "hard_rows:LfF",
            "LfF as DAM's authors ran it, with one encoder for both networks",
            shared=True,
            q=0.3,
        ),
        _here("eiil", "two_stages:EIIL", "GroupDRO over two inferred environments (Creager et al., 2021)"),
        _here("scaling", "two_stages:ClassScaling", "rescale class probabilities for the worst class"),
        _here("afr", "two_stages:AFR", "retrain the last layer with reweighted rows (Qiu et al., 2023)"),
        _here("xrm", "hard_rows:XRM", "environments from twin networks (Pezeshki et al., 2024)"),
        _here("spare", "two_stages:SPARE", "sample clusters of early outputs evenly (Yang et al., 2024)"),
        _here("auto", _REDUCE, "keep the candidate with the most even accuracy across clusters", told=2),
        _here(
            "balance",
            _REDUCE,
            "make the label independent of clusters of frozen features, if that helps",
            candidates=("plain", "balance", "logits"),
        ),
        _here(
            "match",
            _REDUCE,
            "weight rows towards a deployment sample, within each class",
            told=2,
            candidates=("match",),
        ),
        _reference(
            "group_balanced", "group_losses:GroupBalanced", "weight rows so that label and group are independent"
        ),
        _reference("bias_balance", "group_losses:BiasBalance", "adjust logits by group (Hong & Yang, 2021)"),
        _reference("group_dro", "group_losses:GroupDRO", "GroupDRO with the true groups (Sagawa et al., 2020)"),
        _reference("dfr", "group_losses:DFR", "refit the last layer on balanced groups (Kirichenko et al., 2023)"),
        _reference("fscl", "group_losses:FSCL", "fair supervised contrastive loss (Park et al., 2022)"),
        _reference(
            "tadet", "group_losses:TADeT", "align the first token's queries between groups (Sudhakar et al., 2023)"
        ),
        _reference("dsa", "dsa:DSA", "perturb image patches that reveal the group (Qiang et al., 2024)"),
        _language("klaad", "klaad:KLAAD", "align attention of stereotypes and anti-stereotypes (Kim et al., 2025)"),
        _language(
            "balance_pairs",
            "balance_pairs:BalancePairs",
            "remove the mean preference for stereotypes, preserve the rest",
        ),
        _language(
            "balance_control",
            "balance_pairs:BalanceControl",
            "cross-entropy alone on the sentences of balance_pairs, as a control",
        ),
        _language("cda", "sentence_losses:CDA", "train on sentences and their counterfactuals (Zhao et al., 2018)"),
        _language("bias_unlearn", "sentence_losses:BiasUnlearn", "unlearn stereotypes, preserve the rest"),
        _language(
            "sentence_debias",
            "without_training:SentenceDebias",
            "remove the direction of swapped words from the last hidden states (Liang et al., 2020)",
        ),
        _language(
            "self_debias",
            "without_training:SelfDebias",
            "at decoding, make the words of a biased text less likely (Schick et al., 2021)",
        ),
    )
}


def names(kind: Kind | None = None, uses_groups: bool | None = None) -> list[str]:
    """The names in `METHODS`, of one kind, and with or without references."""
    found = METHODS.values()
    return [e.name for e in found if kind in (None, e.kind) and uses_groups in (None, e.uses_groups)]


def listed(kind: Kind, uses_groups: bool | None = None) -> str:
    """Methods and what they do, a line each, in Markdown."""
    return "\n".join(f"- `{name}`: {METHODS[name].about}." for name in names(kind, uses_groups))


def method_named(name: str) -> MethodEntry:
    """The entry of a method, here or of another package."""
    return entry_named(name, METHODS, ENTRY_POINTS, MethodEntry, f"no method {name!r}; known:")


def method(name: str, **options: Any) -> Any:
    """The settings of a method: its registered ones with `options` changed.

    Example:
        >>> method("dam", momentum=0.2).momentum
        0.2
        >>> method("jt")
        Traceback (most recent call last):
        fairhead.errors.InputError: no method 'jt'; known: erm, dam, ... Did you mean 'jtt'?
    """
    return method_named(name).configure(**options)


def named_settings(method: Any) -> tuple[str, dict[str, Any]]:
    """The name of a method and its options, from either of the two ways to give it."""
    if isinstance(method, str):
        method_named(method)
        return method, {}
    place = f"{type(method).__module__}:{type(method).__qualname__}"
    for entry in METHODS.values():
        if entry.settings == place and is_dataclass(method) and not isinstance(method, type):
            default = None if entry.kind == "language" else entry.configure()
            return entry.name, {k: v for k, v in asdict(method).items() if default is None or v != getattr(default, k)}
        if entry.settings == f"{getattr(method, '__module__', '')}:{getattr(method, '__qualname__', '')}":
            raise InputError(f"{method.__name__} is a class; give its settings, such as {method.__name__}()")
    raise InputError(f"{method!r} is no method; give its name ({', '.join(list(METHODS)[:4])}, ...) or its settings")


# Public name -> the module that defines it.
_LATER = {
    name: f"fairhead.{module}"
    for module, names in {
        "mitigate.dam": ("DAM",),
        "mitigate.encoder_layer": ("EncoderLayer",),
        "mitigate.klaad": ("KLAAD",),
        "mitigate.language_trainer": ("LanguageTrainer",),
        "mitigate.row_weights": ("balance_weights", "draw_by_weight", "match_weights"),
        "mitigate.training_job": ("Job", "Stage", "Trained", "run"),
        "mitigate.triplets": ("TripletData",),
        "models": ("attach", "load", "save"),
    }.items()
    for name in names
}

__all__ = ["METHODS", "MethodEntry", "method", *_LATER]

__getattr__ = later(__name__, _LATER)

make_verb(__name__)
