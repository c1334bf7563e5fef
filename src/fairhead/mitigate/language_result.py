"""What methods did to a language model: losses on held-out terms before and after, and where the models lie."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fairhead.language.running import TrainingRecord
from fairhead.mitigate import method_named
from fairhead.mitigate.triplets import NOT_TO_TRAIN_ON, is_crows_pairs
from fairhead.models import load
from fairhead.report import Report, Result, Sentence
from fairhead.report.model_card import Card, name_of, short_data
from fairhead.report.sections.plain import PlainTable, PlainTables


@dataclass(frozen=True)
class MitigatedLanguage(Result):
    """What methods did to a language model, and where the new models are kept."""

    records: Mapping[str, TrainingRecord]  # run -> how its model came about; one run alone has the name ""
    out: Path  # the folder of the model; of several, with a folder each

    @property
    def model(self) -> nn.Module:
        """The new model (of several the first), loaded from its folder."""
        return load(self.out / next(iter(self.records)))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: settings, plan and results of every run."""
        named = {name or record.method: record for name, record in self.records.items()}
        runs = {name: {"settings": r.settings, "plan": r.plan, **r.results} for name, r in named.items()}
        return {"schema": "fairhead.language_grid/1", "runs": runs}

    def rows(self) -> list[dict[str, Any]]:
        """One row per run and part of the loss, on the items that were held out."""
        return [
            {"run": name or record.method, "part": part, "before": before, "after": held["after"][part]}
            for name, record in self.records.items()
            for held in [record.results.get("held_out", {})]
            for part, before in held.get("before", {}).items()
        ]

    def page(self, command: str = "") -> Report:
        """What was done, and the losses on held-out terms before and after."""
        trained = {name: r.results["held_out"] for name, r in self.records.items() if "held_out" in r.results}
        said = [f"{f'{name}: ' if name else ''}{line}." for name, r in self.records.items() for line in _said(r)]
        first = next(iter(trained.values()), None)
        tables = []
        if first is not None and first["before"]:
            losses = {"before": first["before"], **{name or "after": held["after"] for name, held in trained.items()}}
            caption = f"Losses on {first['items']} held-out items"
            rows = [[name, *(f"{value:.4g}" for value in parts.values())] for name, parts in losses.items()]
            tables.append(PlainTable(caption=caption, columns=["", *first["before"]], rows=rows))
        elif first is not None:
            said.append("No term was held out, so the effect on other terms is unknown.")
        record = next(iter(self.records.values()))
        return Report(
            title=f"{', '.join(name or r.method for name, r in self.records.items())} on {record.base}",
            question="How did training change the losses on held-out items?" if trained else "",
            verdict=[Sentence(text, "note") for text in said],
            sections=[PlainTables(title="Losses", tables=tables)] if tables else [],
            provenance={"command": command, **{name or "run": r.settings for name, r in self.records.items()}},
        )


def _said(record: TrainingRecord) -> list[str]:
    done = record.results
    if "held_out" in done:
        left = {reason: len(ids) for reason, ids in done["left_out"].items()}
        missing = [f"left out: {count:,} ({reason})" for reason, count in left.items()]
        n = done["items"] - sum(left.values())
        steps = f"{done['steps']} step{'s'[: done['steps'] != 1]} on {n} item{'s'[: n != 1]}"
        noted = [f"of {count:,} items {reason}" for reason, count in done.get("noted", {}).items()]
        strengths = [f"{n:.1f}{f' for {source}' if source else ''}" for source, n in done.get("strengths", {}).items()]
        steered = [f"strength after the last check: {', '.join(strengths)}"] if strengths else []
        return [steps, *_watched(record), *steered, *noted, *missing]
    if "pairs" in done:
        return [f"{done['pairs']:,} pairs of sentences, {done['components']} direction(s) removed"]
    return [f"no weight was changed; settings: {', '.join(f'{k} {v}' for k, v in record.settings.items())}"]


def _watched(record: TrainingRecord) -> list[str]:
    """What the checks found, where there were any."""
    if "watched" not in record.results:
        return []
    seen = record.results["watched"]
    before, after = seen["before"], seen["after"]
    kept = f"the weights after step {seen['chosen']} are kept"
    if not seen["chosen"]:
        most = f"{(1 + record.plan['perplexity_rise']) * before['perplexity']:.2f} (--perplexity-rise)"
        if before.get("own", 1.0) > 1:  # models of earlier versions have none, nor those that cannot write
            most += f" and {(1 + record.plan['own_rise']) * before['own']:.2f} (--own-rise)"
        kept = (
            "the original weights are kept: no check had a score at least as near to 50 % (or as chance explains), not "
            f"clearly past it, and a perplexity of at most {most}; more --checks or a lower --lr may find one"
        )
    score = f"from {100 * before['ss']:.1f} to {100 * after['ss']:.1f} %"
    if chance := seen.get("chance"):  # models of earlier versions have none
        low, high = max(0.0, before["ss"] - chance), min(1.0, before["ss"] + chance)
        within = "; the score after is within it" if low <= after["ss"] <= high and seen["chosen"] else ""
        score += f" (95 % interval before: {100 * low:.1f} to {100 * high:.1f} %{within})"
    if (before["ss"] - 0.5) * (after["ss"] - 0.5) < 0:
        score += ", past 50 %,"
    perplexity = f"from {before['perplexity']:.2f} to {after['perplexity']:.2f}"
    if before.get("own", 1.0) > 1:  # models of earlier versions have none, nor those that cannot write
        perplexity += f", that of texts it wrote before training from {before['own']:.2f} to {after['own']:.2f}"
    if (back := seen.get("taken_back", 0)) and seen["chosen"]:
        often = f"{back} check{'s'[: back != 1]}"
        kept += f"; {often} beyond --own-rise had the kept weights put back and the learning rate halved"
    return [
        f"on {seen['items']} watched item{'s'[: seen['items'] != 1]} the stereotype score (of the source or category "
        f"most clearly off even) went {score} and perplexity {perplexity}; {kept}"
    ]


def card_of(record: TrainingRecord, carries: str | None) -> Card:
    """The README of a changed model; `carries` names a method that is attached when it is loaded."""
    base, about = record.base and name_of(record.base), method_named(record.method).about
    trained = f"{base or 'A language model'} was changed by {record.method} ({about})."
    if carries is not None:
        weights = f"The weights are those of {base or 'the model as it was'}"
        trained = f"{weights}; {record.method} ({about}) works at decoding."
    data = record.data.get("source", "no data")
    sources = [data] if isinstance(data, str) else list(data)
    said = [f"Data: {', '.join(map(short_data, sources))}", *_said(record)]
    losses = "; ".join(
        f"{row['part']} {row['before']:.4g} and {row['after']:.4g}"
        for row in MitigatedLanguage({"": record}, Path()).rows()
    )
    limits = ["The losses have no interval and do not measure stereotypes."] if losses else []
    if any(is_crows_pairs(*source.partition(":")[::2]) for source in sources):
        limits.append(f"It was trained on CrowS-Pairs. {NOT_TO_TRAIN_ON}.")
    if any(source.casefold().startswith(("bbq:", "memory:bbq-")) for source in sources):
        limits.append("It was trained on contexts of BBQ: of that benchmark, only templates that were held out count.")
    return Card(
        title=f"{base or 'A language model'} with {record.method}",
        done=f"{trained} {'. '.join(said)}.",
        findings=[f"Losses on held-out items, before and after: {losses}."] if losses else (),
        data=", ".join(sources),
        base=record.base,
        limits=limits,
        unmeasured=(
            "Stereotypes and language were not measured when this model was saved. Run `fairhead lm suite` on this "
            "model and on the original one; `fairhead lm compare BEFORE AFTER --markdown README.md` then writes here "
            "what changed, with intervals."
        ),
        carries=carries,
    )
