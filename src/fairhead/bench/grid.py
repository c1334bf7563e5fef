"""A grid: data × backbones × methods × seeds. Imports no torch; `grid_file` reads one from YAML."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Literal, get_args

from fairhead.mitigate.registry import method_named
from fairhead.settings import Count, Range, WholeNumber
from fairhead.train.plan import LanguagePlan, TrainingPlan

# What a grid may set of a plan; the seed is an axis of the grid, and the device an option of the command.
PLAN_FIELDS = tuple(
    dict.fromkeys(
        setting.name
        for setting in (*fields(TrainingPlan), *fields(LanguagePlan))
        if setting.name not in ("seed", "device", "checkpoint_minutes")
    )
)
# How a step is run, not what it computes, and what came after results had been kept: they count where they are set.
COUNT_WHERE_SET = ("data_on_device", "replay", "compile", "accumulate")
Selection = Literal["accuracy", "worst_class"]
SELECTIONS: tuple[str, ...] = get_args(Selection)
PARTS = ("train", "validation", "test")
METRICS = ("DP", "EOp", "EOd", "accuracy", "worst_group_accuracy")


def plan_settings(plan: TrainingPlan) -> dict[str, Any]:
    """A plan as a cell has it: what decides its results, and how often it is saved."""
    values = asdict(plan)
    defaults = {name: getattr(TrainingPlan, name) for name in COUNT_WHERE_SET}
    kept = {name: value for name, value in values.items() if name in (*PLAN_FIELDS, "checkpoint_minutes")}
    return {name: value for name, value in kept.items() if name not in defaults or value != defaults[name]}


@dataclass(frozen=True)
class Data:
    """One data set of a grid.

    Attributes:
        name: how it is called in the table.
        read: reader and path, "utkface:UTKFace.zip".
        options: of the reader.
        group: the group column that gaps are about; None for the first there is.
        split_by_seed: give the reader the seed of the cell, so that each seed has its own split.
        parts: names of the reader's parts, in the order train, validation, test.
        max_length: tokens that texts are cut and padded to.
        limit: at most so many rows in each part, drawn at random by the seed.
        plan: where it differs from the grid's.
        written: `read` as the grid has it, with variables: results are known by it, wherever the data lie.
    """

    name: str
    read: str
    options: Mapping[str, Any] = field(default_factory=dict)
    group: str | None = None
    split_by_seed: bool = False
    parts: tuple[str, ...] = ("train", "val", "test")
    max_length: Count = 128
    limit: Count | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    written: str = ""


@dataclass(frozen=True)
class Backbone:
    """One model of a grid.

    Attributes:
        name: how it is called in the table.
        model: "vit-8x8" (layers × heads, fresh weights) or "path:FOLDER" (pretrained).
        train: "all" of it, or "last_encoder" on frozen features.
        settings: of a fresh model: width, mlp, image_size, patch_size.
        plan: where it differs from the grid's and the data's.
        written: `model` as the grid has it.
    """

    name: str
    model: str
    train: Literal["all", "last_encoder"] = "all"
    settings: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    written: str = ""


@dataclass(frozen=True)
class Method:
    """One method of a grid.

    Attributes:
        name: how it is called in the table.
        method: its name in the registry.
        options: its settings where they differ from the registered ones.
        data_options: settings for single data sets: data name -> options.
        plan: where it differs from all others.
        uses_groups: a reference that trains with groups, or whose epoch is chosen with them.
        selection: "worst_group" for a reference whose epoch is chosen with groups; None for the grid's own rule.
        chosen_with_groups: its hyper-parameters were chosen with groups.
    """

    name: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    data_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    uses_groups: bool = False
    chosen_with_groups: bool = False
    selection: Literal["worst_group"] | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trains_with_groups(self) -> bool:
        """Whether it does, rather than only have its epoch chosen with them."""
        return self.uses_groups and (self.selection is None or method_named(self.method).uses_groups)

    @property
    def remark(self) -> str:
        """How it uses groups; empty where it does not."""
        if self.uses_groups:
            said = ["trains with groups"] if self.trains_with_groups else []
            return ", ".join([*said, "epoch chosen with groups"] if self.selection else said)
        return "chosen with groups" if self.chosen_with_groups else ""


@dataclass(frozen=True)
class Search:
    """A search of hyper-parameters; see `fairhead.bench.search`.

    Attributes:
        configs: random configurations of each method, beside the grid's own settings.
        seed: of the configurations.
        seeds: that trials run on; none of the grid's own.
        with_groups: also show what would be chosen with groups, apart and flagged.
    """

    configs: Count = 10
    seed: WholeNumber = 0
    seeds: tuple[WholeNumber, ...] = (1000,)
    with_groups: bool = False


@dataclass(frozen=True)
class Cell:
    """One run: everything that decides its result. A trial of a search has a number and answers for validation rows.

    Example:
        >>> cell = Cell(Data("d", "utkface:x"), Backbone("b", "vit-2x2"), Method("erm", "erm"), 0, {"epochs": 1})
        >>> cell.name
        'd/b/erm/0'
    """

    data: Data
    backbone: Backbone
    method: Method
    seed: int
    plan: Mapping[str, Any]
    selection: str = "accuracy"
    trial: int | None = None

    @property
    def name(self) -> str:
        """Its place in the grid."""
        trial = "" if self.trial is None else f"trial {self.trial}/"
        return f"{self.data.name}/{self.backbone.name}/{self.method.name}/{trial}{self.seed}"

    def settings(self) -> dict[str, Any]:
        """All that the grid says about it, JSON-ready; `fairhead.bench.fingerprint` fills in what it leaves out."""
        options = {**self.method.options, **self.method.data_options.get(self.data.name, {})}
        data = {name: getattr(self.data, name) for name in ("split_by_seed", "max_length", "limit", "group")}
        data["read"] = self.data.written or self.data.read
        return {
            "data": {**data, "parts": list(self.data.parts), "options": dict(self.data.options)},
            "backbone": {
                "model": self.backbone.written or self.backbone.model,
                "train": self.backbone.train,
                "settings": dict(self.backbone.settings),
            },
            "method": {"name": self.method.method, "options": options},
            "seed": self.seed,
            "plan": dict(self.plan),
            "selection": self.method.selection or self.selection,
            **({} if self.trial is None else {"answers": "validation"}),
        }


@dataclass(frozen=True)
class Grid:
    """Data × backbones × methods × seeds, and what the table of results shows."""

    title: str
    data: tuple[Data, ...]
    backbones: tuple[Backbone, ...]
    methods: tuple[Method, ...]
    seeds: tuple[WholeNumber, ...]
    plan: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""
    selection: Selection = "accuracy"
    baseline: str = "erm"
    metrics: tuple[str, ...] = METRICS
    n_boot: Annotated[int, Range(100)] = 2000
    reported: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    search: Search | None = None

    @property
    def size(self) -> int:
        """How many runs there will be, trials of a search included."""
        cells = len(self.data) * len(self.backbones) * len(self.methods)
        trials = 0 if self.search is None else (self.search.configs + 1) * len(self.search.seeds)
        return cells * (len(self.seeds) + trials)

    def plan_of(self, data: Data, backbone: Backbone, method: Method) -> dict[str, Any]:
        """How to train there: the grid's plan, then the data's, the backbone's, the method's, and the command's."""
        return {**self.plan, **data.plan, **backbone.plan, **method.plan, **self.overrides}

    def cells(self) -> tuple[Cell, ...]:
        """Every cell; those that share data stand together, so that a worker seldom has to read anew."""
        return tuple(
            Cell(data, backbone, method, seed, self.plan_of(data, backbone, method), self.selection)
            for data in self.data
            for backbone in self.backbones
            for seed in self.seeds
            for method in self.methods
        )
