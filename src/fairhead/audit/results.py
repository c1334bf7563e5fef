"""What an audit returns: estimates with intervals, and their JSON form.

These are plain data. The numbers are made in the other files of this folder, the tables in `report/`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairhead.report.result import Result
from fairhead.stats import Difference, Estimate

if TYPE_CHECKING:
    from rich.console import Console

    from fairhead.report.page import Report

AUDIT_SCHEMA = "fairhead.audit/1"
COMPARISON_SCHEMA = "fairhead.comparison/1"


@dataclass(frozen=True)
class GroupRow:
    """One group's own figures.

    Attributes:
        group_by: the group column or intersection.
        group: the group's name.
        n: its rows.
        rates: "selection_rate", "TPR", "FPR", "precision", "accuracy", ... each an `Estimate`.
    """

    group_by: str
    group: str
    n: int
    rates: Mapping[str, Estimate]


@dataclass(frozen=True)
class Audit(Result):
    """Gaps with intervals: what `fairhead.audit` returns.

    Attributes:
        estimates: overall figures first, then those of each group column.
        by_group: the figures of each group of each column.
        provenance: where the rows came from, and the options of the audit.

    Example:
        >>> gap = Estimate("DP", "race", 0.12, 0.08, 0.16, n=500, ideal=0.0)
        >>> found = Audit((gap,), (), {"rows": 500})
        >>> found["DP"].value, found.to_dict()["estimates"][0]["group_by"]
        (0.12, 'race')
    """

    estimates: tuple[Estimate, ...]
    by_group: tuple[GroupRow, ...]
    provenance: Mapping[str, Any]

    def __getitem__(self, key: str | tuple[str, str | None]) -> Estimate:
        """`audit["DP"]` where that is unique, or `audit["DP", "race"]`."""
        metric, group_by = (key, ...) if isinstance(key, str) else key
        found = [e for e in self.estimates if e.metric == metric and group_by in (..., e.group_by)]
        if len(found) != 1:
            have = sorted({(e.metric, e.group_by) for e in self.estimates}, key=str)
            raise KeyError(f"{len(found)} estimates are called {key!r}; there are {have}")
        return found[0]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form (schema, provenance, by_group, estimates)."""
        return {
            "schema": AUDIT_SCHEMA,
            "provenance": dict(self.provenance),
            "by_group": [asdict(row) for row in self.by_group],
            "estimates": [asdict(e) for e in self.estimates],
        }

    def to_json(self, indent: int | None = 2) -> str:
        """The JSON form as text; never NaN, which is not JSON."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False, default=str)

    def rows(self) -> list[dict[str, Any]]:
        """One row an estimate."""
        left_out = ("detail", "groups")
        return [
            {k: v for k, v in vars(e).items() if k not in left_out} | {"groups": " > ".join(e.groups)}
            for e in self.estimates
        ]

    def page(self, name: str | None = None) -> "Report":
        """The audit as a report; `name` says whose predictions they are."""
        from fairhead.audit.findings import audit_verdicts
        from fairhead.report.page import Report
        from fairhead.report.sections.audited import Audited

        name = name or str(self.provenance.get("path", "the predictions"))
        return Report(
            title=f"Audit of {Path(name).name}",
            question=f"Are the predictions in {name} even by {' and '.join(_columns(self))}?",
            verdict=audit_verdicts(self),
            sections=[Audited(title=f"Audit of {name}", name=name, audit=self)],
            provenance=dict(self.provenance),
        )


def _columns(audit: "Audit") -> list[str]:
    """The group columns of an audit, without their intersections."""
    found = dict.fromkeys(e.group_by for e in audit.estimates if e.group_by is not None)
    return [name for name in found if " × " not in name] or ["no group"]


@dataclass(frozen=True)
class Comparison(Result):
    """Paired differences of two sets of predictions: what `fairhead.compare` returns.

    Attributes:
        differences: one for each metric and group column, b minus a.
        a: the audit of the first predictions, on the rows that both have.
        b: the audit of the second.
        provenance: where both came from, how they were joined, and the options.

    Example:
        >>> alone = Audit((), (), {})
        >>> moved = Difference("DP", "race", 0.2, 0.1, -0.1, -0.15, -0.05, 900, p=0.001, p_adjusted=0.004)
        >>> Comparison((moved,), alone, alone, {}).to_dict()["differences"][0]["value"]
        -0.1
    """

    differences: tuple[Difference, ...]
    a: Audit
    b: Audit
    provenance: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "schema": COMPARISON_SCHEMA,
            "provenance": dict(self.provenance),
            "differences": [d.to_dict() for d in self.differences],
            "a": self.a.to_dict(),
            "b": self.b.to_dict(),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """The JSON form as text; never NaN, which is not JSON."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False, default=str)

    def rows(self) -> list[dict[str, Any]]:
        """One row a difference, with its outcome."""
        return [{**d.to_dict(), "outcome": d.outcome} for d in self.differences]

    def page(self, names: tuple[str, str] | None = None) -> "Report":
        """The comparison and both audits as a report; `names` are those of the two sets of predictions."""
        from fairhead.audit.findings import audit_verdicts, comparison_verdicts
        from fairhead.report.page import Report, Sentence
        from fairhead.report.sections.audited import Audited
        from fairhead.report.sections.compared import Compared

        a, b = names or (str(self.provenance.get(side, {}).get("path", side.upper())) for side in "ab")
        both = ((f"A, {a}", self.a), (f"B, {b}", self.b))
        alone = [Sentence(f"{name}: {s.text}", s.tone) for name, audit in both for s in audit_verdicts(audit)]
        title = f"{b} against {a}"
        return Report(
            title=f"Audit of {Path(a).name}",
            question=f"Are the predictions {b} (B) more even by {' and '.join(_columns(self.a))} than {a} (A)?",
            verdict=[*comparison_verdicts(self), *alone],
            sections=[
                Compared(title=title, comparison=self, a_name=a, b_name=b),
                *(
                    Audited(title=f"Audit of {name}", name=name, audit=audit)
                    for name, audit in ((a, self.a), (b, self.b))
                ),
            ],
            provenance=dict(self.provenance),
        )

    def show(self, console: "Console | None" = None, names: tuple[str, str] | None = None) -> None:
        """Print the differences; `result.a.show()` and `result.b.show()` print each audit."""
        from rich.markup import escape

        from fairhead.audit.findings import comparison_verdicts
        from fairhead.report.console import terminal
        from fairhead.report.terminal import show_verdict

        console = console or terminal()
        compared, *_ = self.page(names).sections
        heading = f"A = {compared.a_name}, B = {compared.b_name}"
        console.print(f"[bold]{escape(heading)}[/]", highlight=False)
        show_verdict(console, comparison_verdicts(self))
        compared.show(console)
