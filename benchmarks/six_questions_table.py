"""The Markdown tables of docs/results/locate-six-questions.md, from the JSON that six_questions.py writes."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FREE = ("race-by-gender", "age-by-gender", "smiling-by-male")  # at most half a point of accuracy there
SHORT = {"EOd": "EOd", "cramers_v": "V", "cramers_v_corrected": "corrected V"}
Result = Mapping[str, Any]  # of one question on one split


def allowed_cost(result: Result) -> float:
    """Half a point, and what the balanced last layer costs where the group says much about the label."""
    plain, balanced = result["balanced_last_layer"]["accuracy"]
    return float(0.005 + (0.0 if result["question"] in FREE else max(0.0, plain - balanced)))


def metrics_of(result: Result, edit: str) -> tuple[str, ...]:
    """The gaps by which an edit is judged: the one that it was told, or both."""
    told = result["edits"][edit].get("metric")
    return ("EOd", "cramers_v") if told is None else (told,)


def fails(result: Result, edit: str, metric: str) -> list[str]:
    """What an edit misses of the bar on one split."""
    changes, found = result["edits"][edit]["changes"], []
    if abs(changes[metric]["b"]) > 0.5 * abs(changes[metric]["a"]):
        found.append("not halved")
    if -changes["accuracy"]["value"] > allowed_cost(result):
        found.append("cost")
    return found


def meets(result: Result, edit: str) -> list[str]:
    """The gaps that an edit halves at a cost within the bar."""
    return [metric for metric in metrics_of(result, edit) if not fails(result, edit, metric)]


class Line:
    """One edit of one question, judged by one gap, over splits."""

    def __init__(self, results: Sequence[Result], edit: str, metric: str) -> None:
        self.results, self.edit, self.metric = results, edit, metric
        self.edits = [result["edits"][edit] for result in results]
        of = [{name: part["changes"][name] for name in (metric, "accuracy")} for part in self.edits]
        self.before, self.after = (np.array([abs(one[metric][side]) for one in of]) for side in "ab")
        self.accuracy = np.array([one["accuracy"]["value"] for one in of])
        self.allowed = np.array([allowed_cost(result) for result in results])
        self.missed = [fails(result, edit, metric) for result in results]

    @property
    def controls(self) -> list[tuple[int, int]]:
        """Control sets beaten, of how many, on the splits where they were run."""
        found = [part["controls"][self.metric] for part in self.edits if self.metric in part.get("controls", {})]
        return [(round((1 - c["percentile"]) * c["n"]), c["n"]) for c in found]

    @property
    def verdict(self) -> str:
        """Met: in most splits, on average, and beyond 99 % of the controls wherever they were run."""
        met, n = sum(not missed for missed in self.missed), len(self.missed)
        on_average = self.after.mean() <= 0.5 * self.before.mean() and -self.accuracy.mean() <= self.allowed.mean()
        if 2 * met <= n or not on_average:
            return "fails"
        if not self.controls:
            return "open: controls"
        return "met" if all(beaten >= 0.99 * of for beaten, of in self.controls) else "fails: controls"

    @property
    def row(self) -> str:
        """As a line of the table."""
        halved, cheap = (sum(why not in missed for missed in self.missed) for why in ("not halved", "cost"))
        n, both = len(self.missed), sum(not missed for missed in self.missed)
        costs = ", ".join(_signed(100 * x, 1) for x in self.accuracy)
        left = ", ".join(f"{100 * b / a:.0f}" for a, b in zip(self.before, self.after, strict=True))
        saved = [part["saved"]["predictions that differ"] for part in self.edits if "saved" in part]
        heads = sorted({len(part["heads"]) for part in self.edits})
        return _line(
            self.results[0]["question"],
            f"{'gains, told' if self.edit != 'gains' else 'gains'} ({_span(heads)} heads)",
            f"{SHORT[self.metric]} {self.before.mean():.3f} → {self.after.mean():.3f}",
            f"{100 * self.after.mean() / self.before.mean():.0f} % ({left})",
            f"{_signed(100 * self.accuracy.mean(), 1)} ({costs}); {_signed(-100 * self.allowed.mean(), 1)} allowed",
            f"{halved}, {cheap}, {both} of {n}",
            ", ".join(f"{beaten} of {of}" for beaten, of in self.controls) or "not run",
            ", ".join(map(str, saved)) or "not run",
            self.verdict,
        )


def lines(results: Sequence[Result]) -> Iterator[Line]:
    """All edits of one question."""
    for edit in dict.fromkeys(edit for result in results for edit in result["edits"]):
        some = [result for result in results if edit in result["edits"]]
        for metric in metrics_of(some[0], edit):
            yield Line(some, edit, metric)


def print_tables(folder: Path, questions: Sequence[str]) -> None:
    """All that the page shows of a folder of splits."""
    every = [one for file in sorted(folder.glob("split-*.json")) for one in json.loads(file.read_text())]
    by_question = {name: [one for one in every if one["question"] == name] for name in questions}
    by_question = {name: sorted(some, key=lambda one: one["split"]) for name, some in by_question.items() if some}
    print("| question | splits | rows reported | accuracy | EOd | V | corrected V | V of the labels |", end="")
    print(" balanced last layer | group erased at the output |\n|---|---|---|---|---|---|---|---|---|---|")
    for name, results in by_question.items():
        plain = [one["balanced_last_layer"] for one in results]
        first = {metric: np.mean([one[metric][0] for one in plain]) for metric in plain[0]}
        labels = first["cramers_v"] - first["cramers_v_excess"]
        rows = _span(sorted(one["reported"] for one in results))
        others = [_baseline([one[key] for one in results]) for key in ("balanced_last_layer", "erased_at_output")]
        gaps = (f"{first[metric]:.3f}" for metric in SHORT)
        print(_line(name, len(results), rows, f"{100 * first['accuracy']:.1f}", *gaps, f"{labels:.3f}", *others))
    print("\n| question | edit | gap, mean of splits | left of it (each split) | accuracy, points (each split)", end="")
    print(" | splits: halved, cost, both | controls beaten | saved: differ | verdict |", "|---" * 9 + "|", sep="\n")
    for results in by_question.values():
        for line in lines(results):
            print(line.row)
    print(
        "\n| question | gap | split | weight | out of fold: gap (bound) | left there | left in reported rows |", end=""
    )
    print(" accuracy out of fold | change reported |\n|---|---|---|---|---|---|---|---|---|")
    for name, results in by_question.items():
        for result in results:
            for part in result["edits"].values():
                if "metric" in part:
                    print(_told(name, result, part))
    told = [part for one in every for part in one["edits"].values() if "metric" in part and part["reached"]]
    hit = sum(_left(part) <= 0.5 for part in told)
    print(f"\nOf {len(told)} told gains whose bound was within the target, {hit} reached it in the reported rows.")


def _left(part: Mapping[str, Any]) -> float:
    change = part["changes"][part["metric"]]
    return abs(change["b"]) / abs(change["a"]) if change["a"] else float("nan")


def _told(name: str, result: Result, part: Mapping[str, Any]) -> str:
    """How told gains were chosen on one split, and what became of that."""
    there = f"{part['before']:.3f} → {part['gap']:.3f} ({part['upper']:.3f}{'' if part['reached'] else ', not enough'})"
    shares = (f"{100 * x:.0f} %" for x in (part["gap"] / part["before"], _left(part)))
    change = _signed(100 * part["changes"]["accuracy"]["value"], 1)
    cells = f"{part['weight']:g}", there, *shares, f"{100 * part['accuracy']:.1f}", change
    return _line(name, SHORT[part["metric"]], result["split"], *cells)


def _span(values: Sequence[int]) -> str:
    return str(values[0]) if values[0] == values[-1] else f"{values[0]}–{values[-1]}"


def _line(*cells: object) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def _baseline(figures: Sequence[Mapping[str, Sequence[float]]]) -> str:
    """Of something else than heads, in the mean over splits: what it costs, and the gaps that it leaves."""
    cost = np.mean([one["accuracy"][1] - one["accuracy"][0] for one in figures])
    left = ", ".join(f"{short} {np.mean([one[metric][1] for one in figures]):.3f}" for metric, short in SHORT.items())
    return f"{_signed(100 * float(cost), 1)} points; {left}"
