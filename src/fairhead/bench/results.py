"""What a table of results holds. Imports no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fairhead.audit import METRICS
from fairhead.audit.seeds import SeedDifference, SeedFigure
from fairhead.report.frontier import Frontier
from fairhead.report.sections.bench_block import Choice as Choice
from fairhead.report.sections.bench_block import Cost as Cost
from fairhead.stats import ALPHA, Outcome

TABLE_SCHEMA = "fairhead.bench.table/1"


@dataclass(frozen=True)
class Line:
    """One method in a block.

    Attributes:
        method: its name.
        uses_groups: it trains or was chosen with groups: a reference, never in bold.
        seeds: those that are done.
        figures: metric -> figure over seeds.
        differences: metric -> paired difference from the baseline.
        p_adjusted: metric -> p of that difference, corrected over the methods of the block (Holm).
        best: metrics in which it is significantly better than every other method.
        cost: averaged over seeds.
        failed: seed -> error of the cells that came to nothing.
        remark: how it uses groups, if it does.
        search: what a search of its hyper-parameters found; None where there was none.
    """

    method: str
    uses_groups: bool
    seeds: tuple[int, ...]
    figures: Mapping[str, SeedFigure]
    differences: Mapping[str, SeedDifference]
    p_adjusted: Mapping[str, float | None]
    best: frozenset[str]
    cost: Cost | None
    failed: Mapping[int, str]
    remark: str = ""
    search: Choice | None = None

    @property
    def aside(self) -> str:
        """The remark in brackets, unless the name says it already."""
        return f" ({self.remark})" if self.remark and self.remark not in self.method else ""

    def outcome(self, metric: str) -> Outcome:
        """What may be said of the difference from the baseline."""
        p, difference = self.p_adjusted.get(metric), self.differences[metric]
        if difference.value is None:
            return "undefined"
        if p is None or p >= ALPHA:
            return "not significant"
        return "better" if is_better(metric, difference.value) else "worse"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "method": self.method,
            "uses_groups": self.uses_groups,
            "seeds": list(self.seeds),
            "figures": {name: figure.to_dict() for name, figure in self.figures.items()},
            "differences": {
                name: {**d.to_dict(), "p_adjusted": self.p_adjusted.get(name), "outcome": self.outcome(name)}
                for name, d in self.differences.items()
            },
            "best": sorted(self.best),
            "cost": None if self.cost is None else vars(self.cost),
            "failed": {str(seed): error for seed, error in self.failed.items()},
            "remark": self.remark,
            "search": None if self.search is None else asdict(self.search),
        }


@dataclass(frozen=True)
class Block:
    """All methods on one data set with one backbone.

    Attributes:
        data: name of the data set.
        backbone: name of the model.
        group: the column that gaps are about.
        n: test rows, averaged over seeds.
        lines: one a method.
        frontier: of fairness and accuracy; None where a figure is undefined.
        verdict: what the block shows, in a few sentences.
        findings: one sentence for each metric.
    """

    data: str
    backbone: str
    group: str
    n: int
    lines: tuple[Line, ...]
    frontier: Frontier | None
    verdict: str
    findings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "data": self.data,
            "backbone": self.backbone,
            "group": self.group,
            "n": self.n,
            "verdict": self.verdict,
            "findings": list(self.findings),
            "methods": [line.to_dict() for line in self.lines],
            "frontier": None if self.frontier is None else asdict(self.frontier),
        }


@dataclass(frozen=True)
class Table:
    """The results of a grid."""

    title: str
    about: str
    baseline: str
    metrics: tuple[str, ...]
    blocks: tuple[Block, ...]
    reported: Mapping[str, Any]
    provenance: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; values are fractions."""
        return {
            "schema": TABLE_SCHEMA,
            "title": self.title,
            "about": self.about,
            "baseline": self.baseline,
            "metrics": list(self.metrics),
            "blocks": [block.to_dict() for block in self.blocks],
            "reported": dict(self.reported),
            "provenance": dict(self.provenance),
        }


def is_better(metric: str, change: float) -> bool:
    """Whether a change of a metric is towards its ideal.

    Example:
        >>> is_better("EOd", -0.02), is_better("accuracy", -0.02)
        (True, False)
    """
    return change > 0 if METRICS[metric].ideal else change < 0
