"""A grid: data × backbones × methods × seeds. Imports no torch; `grid_file` reads one from YAML."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from fairhead.errors import InputError
from fairhead.mitigate import LADDER, method_named, names
from fairhead.settings import Count, Option, Replicates, Seed
from fairhead.train import LanguagePlan, TrainingPlan

# What a grid may set of a plan; the seed is an axis of the grid, and the device an option of the command.
_NOT_OF_PLAN = ("seed", "device", "checkpoint_minutes")
PLAN_FIELDS = tuple(
    dict.fromkeys(f.name for f in (*fields(TrainingPlan), *fields(LanguagePlan)) if f.name not in _NOT_OF_PLAN)
)
# Defaults of a single run, in Python and on the command line.
RUN_PLAN: Mapping[str, Any] = {"learning_rate": 1e-4}
# These settings change how a step runs, or are newer than stored results: they count only where they are set.
COUNT_WHERE_SET = ("data_on_device", "replay", "compile", "accumulate")
Selection = Literal["accuracy", "worst_class"]
Train = Literal["all", "last_encoder", "head"]
SELECTIONS: tuple[str, ...] = get_args(Selection)
PARTS = ("train", "validation", "test")
METRICS = ("DP", "EOp", "EOd", "accuracy", "worst_group_accuracy")
NAMING = ("teacher", "encoder", "adversary")  # options of methods that name a model
# Names that an option of a method would have if it were a group.
_GROUP_WORDS = ("group", "groups", "attribute", "attributes", "sensitive", "group_by", "protected")
_VARIABLE = re.compile(r"\$\{(\w+)\}")


def plan_settings(plan: TrainingPlan) -> dict[str, Any]:
    """A plan as a cell has it: what decides its results, and how often it is saved."""
    kept = {name: value for name, value in asdict(plan).items() if name in (*PLAN_FIELDS, "checkpoint_minutes")}
    unset = {name for name in COUNT_WHERE_SET if kept[name] == getattr(TrainingPlan, name)}
    return {name: value for name, value in kept.items() if name not in unset}


@dataclass(frozen=True)
class Data:
    """One data set of a grid."""

    name: str  # how it is called in the table
    read: str  # reader and path, "utkface:UTKFace.zip"
    options: Mapping[str, Any] = field(default_factory=dict)  # of the reader
    group: str | None = None  # the group column that gaps are about; None for the first there is
    split_by_seed: bool = False  # give the reader the seed of the cell, so that each seed has its own split
    parts: tuple[str, ...] = ("train", "val", "test")  # the reader's names of train, validation and test
    max_length: Count = 128  # tokens that texts are cut and padded to
    limit: Count | None = None  # at most so many rows in each part, drawn at random by the seed
    like: str | None = None  # a deployment sample: a file that the same reader reads
    plan: Mapping[str, Any] = field(default_factory=dict)  # where it differs from the grid's
    written: str = ""  # `read` as the grid has it, with variables: results are known by it, wherever the data lie


@dataclass(frozen=True)
class Backbone:
    """One model of a grid."""

    name: str  # how it is called in the table
    model: str  # "vit-8x8" (layers × heads, fresh weights), "path:FOLDER" (pretrained), or "features:FILE.npz"
    train: Train = "all"  # "all" of it; the "last_encoder" on frozen features; or a linear "head" alone
    settings: Mapping[str, Any] = field(default_factory=dict)  # of a fresh model: width, mlp, image_size, patch_size
    plan: Mapping[str, Any] = field(default_factory=dict)  # where it differs from the grid's and the data's
    written: str = ""  # `model` as the grid has it


@dataclass(frozen=True)
class Method:
    """One method of a grid."""

    name: str  # how it is called in the table
    method: str  # its name in the registry
    options: Mapping[str, Any] = field(default_factory=dict)  # its settings where they differ from the registered ones
    # Settings for single data sets: data name -> options
    data_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    uses_groups: bool = False  # a reference that trains with groups, or whose epoch is chosen with them
    chosen_with_groups: bool = False  # its hyper-parameters were chosen with groups
    # How a reference's epoch is chosen with groups, by "worst_group" on validation rows or by "test_eod", the smallest
    # EOd on the test rows, which is circular; None for the grid's own rule
    selection: Literal["worst_group", "test_eod"] | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)  # where it differs from all others
    model: str | None = None  # a fresh one in place of the backbone's, where a method's authors gave it another

    @property
    def circular(self) -> bool:
        """Whether the rows that test it have chosen its epoch: no result, whatever it shows."""
        return self.selection == "test_eod"

    @property
    def trains_with_groups(self) -> bool:
        """Whether it does, rather than only have its epoch chosen with them."""
        return self.uses_groups and (self.selection is None or method_named(self.method).uses_groups)

    @property
    def remark(self) -> str:
        """How it uses groups; empty where it does not."""
        if self.uses_groups:
            said = ["trains with groups"] if self.trains_with_groups else []
            how = "circular: epoch chosen by EOd of the test rows" if self.circular else "epoch chosen with groups"
            return ", ".join([*said, how] if self.selection else said)
        return "chosen with groups" if self.chosen_with_groups else ""

    @property
    def told(self) -> int:
        """Its level on the `LADDER`: that of its registration, or higher if its options or its selection use more."""
        if self.remark:
            return len(LADDER) - 1
        options = [pair for given in (self.options, *self.data_options.values()) for pair in given.items()]
        pretrained = any((key == "encoder" and value) or str(value).startswith("path:") for key, value in options)
        sampled = any(
            (key == "candidates" and {"match", "both"} & set(value)) or (key == "without_label" and value)
            for key, value in options
        )
        return max(method_named(self.method).told, int(pretrained), 2 * int(sampled))


@dataclass(frozen=True)
class Search:
    """A search of hyper-parameters; see `fairhead.bench.runner`."""

    configs: Count = 10  # random configurations of each method, beside the grid's own settings
    seed: Seed = 0  # of the configurations
    seeds: tuple[Seed, ...] = (1000,)  # that trials run on; none of the grid's own
    with_groups: bool = False  # also show what would be chosen with groups, apart and flagged


@dataclass(frozen=True)
class Cell:
    """One run: everything that decides its result. A trial of a search has a number and answers for validation rows."""

    data: Data
    backbone: Backbone
    method: Method
    seed: int
    plan: Mapping[str, Any]
    selection: str = "accuracy"
    trial: int | None = None

    @property
    def name(self) -> str:
        """Its name: data, backbone, method and seed."""
        trial = "" if self.trial is None else f"trial {self.trial}/"
        return f"{self.data.name}/{self.backbone.name}/{self.method.name}/{trial}{self.seed}"

    @property
    def options(self) -> dict[str, Any]:
        """The options of its method."""
        return {**self.method.options, **self.method.data_options.get(self.data.name, {})}

    def settings(self) -> dict[str, Any]:
        """All that the grid says about it, JSON-ready; `fairhead.bench.cell.effective` fills in what it leaves out."""
        data = {name: getattr(self.data, name) for name in ("split_by_seed", "max_length", "limit", "group")}
        data["read"] = self.data.written or self.data.read
        data |= {} if self.data.like is None else {"like": self.data.like}
        return {
            "data": {**data, "parts": list(self.data.parts), "options": dict(self.data.options)},
            "backbone": {
                "model": self.backbone.written or self.backbone.model,
                "train": self.backbone.train,
                "settings": dict(self.backbone.settings),
            },
            "method": {"name": self.method.method, "options": self.options},
            "seed": self.seed,
            "plan": dict(self.plan),
            "selection": self.method.selection or self.selection,
            **({} if self.trial is None else {"answers": "validation"}),
        }


@dataclass(frozen=True)
class RunSettings:
    """How one classifier is trained and tested, beside the training plan: `fairhead.mitigate` and its command.

    Attributes:
        parts: names of the train, validation and test parts in the data, separated by commas.
        limit: use at most this many rows of each part.
        max_length: length in tokens to which texts are truncated and padded.
        train: train all of the model, its last encoder layer on frozen features, or only a linear head (seconds).
        like: a deployment sample for match and auto: a file in the format of --data.
        model_options: a setting of a new model: width, mlp, image_size, patch_size.
        selection: criterion for the best epoch on validation rows; worst_group needs --reference-group and is marked.
        reference_group: group column that references and --selection worst_group use.
        against: also train this method and make a paired comparison; erm is plain training.
        cache: folder for decoded pictures and frozen features.
        device: device: cpu, cuda, cuda:1, ...; auto uses a GPU if there is one.
    """

    parts: Annotated[str, Option(metavar="A,B,C", panel="Data")] = "train,val,test"
    limit: Annotated[Count | None, Option(metavar="N", panel="Data")] = None
    max_length: Annotated[Count, Option(metavar="N", panel="Data")] = 128
    train: Train = "all"
    like: Annotated[str | None, Option(metavar="FILE", panel="Data")] = None
    model_options: Annotated[Mapping[str, Any], Option("--model-option", "KEY=VALUE")] = field(default_factory=dict)
    selection: Literal["accuracy", "worst_class", "worst_group"] = "accuracy"
    reference_group: Annotated[str | None, Option(metavar="COLUMN")] = None
    against: Annotated[str | None, Option(metavar="METHOD")] = None
    cache: Annotated[Path | None, Option(metavar="DIR", panel="Output")] = None
    device: Annotated[str, Option(panel="Output")] = "auto"
    panel: ClassVar[str] = "Model and method"

    def groups_to_read(self, data: str, groups: Sequence[str]) -> tuple[str, ...]:
        """The group columns to read, with that of a reference where the reader does not read it by itself."""
        from fairhead.data import parse_spec

        if self.reference_group is None or not (groups or not parse_spec(data).reader.options.get("groups", True)):
            return tuple(groups)
        return tuple(dict.fromkeys((*groups, self.reference_group)))

    def cell(
        self,
        model: str,  # a fresh one by name, a folder, or a name of the hub
        data: str,  # as reader:path
        method: Method,  # its name and options; whether it uses groups follows from these settings
        reader_options: Mapping[str, Any],  # of the reader
        group: str | None,  # the column that gaps are about; None for the first there is
        plan: Mapping[str, Any],  # how to train
        seed: int,  # of weights, batches and, where the reader draws one, the split
    ) -> Cell:
        """The run of a method."""
        from fairhead.data import parse_spec

        for name in method.options:
            if name.lower() in _GROUP_WORDS:
                raise InputError(
                    f"--option {name}=...: groups are for auditing only, training never sees them. The methods that do "
                    f"train with groups ({', '.join(names(uses_groups=True))}) take --reference-group COLUMN"
                )
        by_group = self.selection == "worst_group"
        if self.against == method.name and not method.options and not by_group:
            raise InputError(
                f"--against {method.name} is the method itself: name another, or give it options of its own"
            )
        three = tuple(part.strip() for part in self.parts.split(","))
        if len(three) != 3:
            raise InputError(f"--parts is {self.parts!r}; expected three names, those of train, validation and test")
        self._check_reference(method.method)
        uses_groups = self.reference_group is not None
        return Cell(
            data=Data(
                name=data.partition(":")[0],
                read=data,
                options=reader_options,
                group=self.reference_group or group,
                split_by_seed="seed" not in reader_options and "seed" in parse_spec(data).reader.options,
                parts=three,
                max_length=self.max_length,
                limit=self.limit,
                like=self.like,
            ),
            backbone=Backbone(Path(model).name, model, self.train, self.model_options),
            method=replace(method, uses_groups=uses_groups, selection="worst_group" if by_group else None),
            seed=seed,
            plan=plan,
            selection="accuracy" if by_group else self.selection,
        )

    def _check_reference(self, method: str) -> None:
        """Refuse a group for a run that looks at none, and none for one that does."""
        trains_with, by_group = method_named(method).uses_groups, self.selection == "worst_group"
        if self.reference_group is not None and not trains_with and not by_group:
            raise InputError(
                f"{method} never sees a group, and --reference-group {self.reference_group} would give it one: leave "
                "it out. All group columns of the data are in the audit"
            )
        if self.reference_group is None and trains_with:
            raise InputError(
                f"{method} trains with the sensitive attribute: say which column with --reference-group, or use a "
                "method that needs none"
            )
        if self.reference_group is None and by_group:
            raise InputError(
                "--selection worst_group looks at the groups of validation rows: say which column with "
                "--reference-group, or choose by worst_class, which needs none"
            )


@dataclass(frozen=True)
class Grid:
    """Data × backbones × methods × seeds, and what the table of results shows."""

    title: str
    data: tuple[Data, ...]
    backbones: tuple[Backbone, ...]
    methods: tuple[Method, ...]
    seeds: tuple[Seed, ...]
    plan: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""
    selection: Selection = "accuracy"
    baseline: str = "erm"
    metrics: tuple[str, ...] = METRICS
    n_boot: Replicates = 2000
    reported: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    search: Search | None = None

    @property
    def size(self) -> int:
        """How many runs there will be, trials of a search included."""
        cells = len(self.data) * len(self.backbones) * len(self.methods)
        trials = 0 if self.search is None else (self.search.configs + 1) * len(self.search.seeds)
        return cells * (len(self.seeds) + trials)

    def cells(self) -> tuple[Cell, ...]:
        """Every cell; those that share data stand together, so that a worker seldom has to read them again."""
        made = []
        for data, backbone, seed, method in product(self.data, self.backbones, self.seeds, self.methods):
            plan = {**self.plan, **data.plan, **backbone.plan, **method.plan, **self.overrides}
            own = backbone if method.model is None else replace(backbone, model=method.model, written="")
            made.append(Cell(data, own, method, seed, plan, self.selection))
        return tuple(made)


def expanded(text: str, where: str, environment: Mapping[str, str] | None = None) -> str:
    """Fill in `${NAME}` from the environment.

    Example:
        >>> expanded("path:${MODELS}/clip", "the backbone", {"MODELS": "/mnt"})
        'path:/mnt/clip'
    """
    environment = os.environ if environment is None else environment
    for name in _VARIABLE.findall(text):
        if not environment.get(name):
            raise InputError(
                f"{where} is at {text!r}, and the variable {name} is not set: export {name}=FOLDER, "
                "or leave it out with --set"
            )
    return _VARIABLE.sub(lambda match: environment[match[1]], text)
