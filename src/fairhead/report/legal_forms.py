"""Forms that laws ask for, filled from an audit: New York City's Local Law 144, and the EU AI Act.

What an audit cannot know is left open and says so. Neither form is legal advice.
"""

from collections.abc import Sequence

from fairhead.errors import InputError
from fairhead.report.form import AuditFigures
from fairhead.report.page import Report, Sentence
from fairhead.report.sections.plain import PlainTable, PlainTables
from fairhead.report.wording import (
    CROSS,
    FOUR_FIFTHS,
    count,
    left_out,
    level,
    listed,
    metric_name,
    said,
    with_interval,
)
from fairhead.stats import GroupRow
from fairhead.stats.bootstrap import STABLE_ROWS

# A category with a smaller share of the rows may be left out of impact ratios (6 RCNY § 5-301).
SMALL_CATEGORY = 0.02
_SMALL = f"{100 * SMALL_CATEGORY:g} %"
_OPEN = "not part of an audit; to be filled in by {}."
AUDITOR, PROVIDER = (_OPEN.format(f"the {who}") for who in ("auditor", "provider"))
_MOST_GROUPS = 12  # that an entry names
_NO_LIMIT = "Local Law 144 sets no limit; four fifths is a rule of thumb of the Uniform Guidelines on selection."


def local_law_144(audit: AuditFigures) -> Report:
    """The tables of a bias audit under New York City's Local Law 144 of 2021 and the rules of its department.

    Selection rates and impact ratios for each group column (sex; race or ethnicity) and for their intersections. An
    impact ratio is the category's selection rate over the highest one. Categories with less than 2 % of the rows are
    left out of impact ratios, with their number and rate. Where the tool gives scores, let the predictions be "above
    the median" (`--threshold median`): selection rates are scoring rates then.
    """
    if not any(CROSS in name for name in audit.groups()):
        raise InputError("Local Law 144 asks for sex, race or ethnicity, and both crossed: add --intersections")
    if "selection_rate" not in audit.by_group[0].rates:
        raise InputError(
            "Local Law 144 is about being selected or not: name the class that means selected (--positive)"
        )
    options, origin = audit.options, audit.provenance
    if origin.get("columns", {}).get("weight") is not None:
        raise InputError("Local Law 144 counts applicants: audit without --weight")
    rule = str(options.get("prediction") or f"predicted class {options.get('classes', ['?'])[-1]}")
    scored = rule.startswith("score > median")
    headings = (
        "Category",
        "Applicants",
        "Share",
        "Above the median" if scored else "Selected",
        f"{'Scoring' if scored else 'Selection'} rate, {level(audit.level)} interval",
        "Impact ratio",
    )
    tables, failing = [], []
    for name, rows in audit.groups().items():
        total = sum(row.n for row in rows)
        counted = [row for row in rows if row.n >= SMALL_CATEGORY * total]
        best = max((row.rates["selection_rate"].value or 0.0 for row in counted), default=0.0)
        ratios = {row.group: _impact_ratio(row, best) for row in counted}
        low = {group: ratio for group, ratio in ratios.items() if ratio is not None and ratio < FOUR_FIFTHS}
        failing += [f"{group} {ratio:.2f}" for group, ratio in low.items()]
        lines = [_category(row, total, ratios.get(row.group), row in counted) for row in rows]
        tables.append(PlainTable(caption=f"By {name}", columns=headings, rows=lines))
    unknown = ", ".join(f"{count(number)} ({name})" for name, number in options.get("without_group", {}).items())
    facts = {
        "Data": f"{origin.get('path', 'a table')}, {count(options.get('n', 0))} rows. Source: {AUDITOR}",
        "Selected means": rule,
        "Individuals left out, of an unknown category": unknown or "0",
        "Rows left out, with other values missing": count(origin.get("rows_dropped", 0)),
        "Date of the bias audit": AUDITOR,
        "Date on which the tool was first used": _OPEN.format("the employer"),
        f"Categories below {_SMALL} of the rows": f"Left out of impact ratios. The reason: {AUDITOR}",
    }
    verdict = Sentence(f"Impact ratios below {FOUR_FIFTHS:g}: {', '.join(failing)}.", "bad")
    if not failing:
        text = f"No category with {_SMALL} of the rows or more has an impact ratio below {FOUR_FIFTHS:g}."
        verdict = Sentence(text, "good")
    overall = [e for e in audit.estimates if e.metric == "impact_ratio" and e.value is not None]
    tested = "; ".join(
        f"by {e.group_by} {e.value:.2f} ({e.low:.2f} to {e.high:.2f}, {said(e, audit.level)})" for e in overall
    )
    more = f"The smallest ratio of any two groups, with its interval, small categories included: {tested}."
    return Report(
        title="Bias audit: summary of results",
        question="Local Law 144: are applicants of each sex, race or ethnicity, and of both, selected at like rates?",
        verdict=[verdict, Sentence(_NO_LIMIT, "note"), *([Sentence(more, "note")] if tested else [])],
        sections=[_facts("Summary", facts), PlainTables(title="Rates and impact ratios", tables=tables)],
        provenance=dict(origin),
        brand="form",
    )


def _impact_ratio(row: GroupRow, best: float) -> float | None:
    value = row.rates["selection_rate"].value
    return None if value is None or not best else value / best


def _category(row: GroupRow, total: int, ratio: float | None, counted: bool) -> Sequence[str]:
    rate = row.rates["selection_rate"]
    share = f"{100 * row.n / total:.1f} %"
    if rate.value is None:
        return row.group, count(row.n), share, "–", f"undefined: {rate.undefined}", "–"
    shown = f"{ratio:.2f}" if ratio is not None else "–" if counted else "left out: below 2 %"
    return row.group, count(row.n), share, count(round(rate.value * row.n)), with_interval(rate), shown


def eu_ai_act(audit: AuditFigures) -> Report:
    """A fact sheet by the headings of Article 10 and Annex IV of the EU AI Act (Regulation (EU) 2024/1689)."""
    single = [name for name in audit.groups() if CROSS not in name]
    return Report(
        title="Fact sheet: data governance and technical documentation",
        question=f"What does this audit by {listed(single, 'and')} add to Article 10 and Annex IV of the EU AI Act?",
        verdict=[Sentence("Entries that an audit cannot fill say so. This sheet is not legal advice.", "note")],
        sections=[
            _facts("Article 10: data and data governance", _article_10(audit, single), *_findings(audit)),
            _facts("Annex IV: technical documentation", _annex_4(audit, single)),
        ],
        provenance=dict(audit.provenance),
        brand="form",
    )


def _article_10(audit: AuditFigures, columns: Sequence[str]) -> dict[str, str]:
    origin, options = audit.provenance, audit.options
    rows = f"{count(options.get('n', 0))} rows"
    without = f"; {count(origin['rows_dropped'])} with missing values left out" if origin.get("rows_dropped") else ""
    lost = {name: number for name, number in options.get("without_group", {}).items() if name in columns}
    without += "".join(f"{',' if i else ';'} without {name} {count(lost[name])}" for i, name in enumerate(lost))
    kept = f"; only those that meet the condition {origin['where']}" if origin.get("where") else ""
    file = f"File {origin.get('path', 'not recorded')}, SHA-256 {origin.get('sha256', 'not recorded')}."
    label = origin.get("columns", {}).get("label", "label")
    groups = [row for row in audit.by_group if row.n < STABLE_ROWS]
    gaps = [f"{row.group} ({row.group_by}) has {count(row.n)} row{'' if row.n == 1 else 's'}" for row in groups]
    if len(gaps) > _MOST_GROUPS:
        gaps[_MOST_GROUPS:] = [
            f"{len(gaps) - _MOST_GROUPS} more groups have fewer than {STABLE_ROWS} rows (in the JSON)"
        ]
    gaps += [f"{metric_name(e.metric)} by {e.group_by} is undefined" for e in audit.estimates if e.value is None]
    return {
        "10(2)(a) Design choices": PROVIDER,
        "10(2)(b) Collection and origin": f"{file} Collection: {PROVIDER}",
        "10(2)(c) Preparation": f"{rows}{without}{kept}. Labelling, cleaning, enrichment: {PROVIDER}",
        "10(2)(d) Assumptions": f"The labels are those of the column {label!r}. What they stand for: {PROVIDER}",
        "10(2)(e) Availability, quantity, suitability": f"{rows}. {_sizes(audit, columns)}.",
        "10(2)(f) Examination for bias": "See the table below." if _findings(audit) else "No gap is significant.",
        "10(2)(g) Measures against bias": PROVIDER,
        "10(2)(h) Gaps and shortcomings": "; ".join(gaps) or f"No group has fewer than {STABLE_ROWS} rows.",
        "10(3) Representativeness": f"Base rates: {_rates(audit, columns, 'base_rate')}. Population: {PROVIDER}",
        "10(4) Setting of use": PROVIDER,
        "10(5) Special categories of data": f"{', '.join(columns)}: used for this audit only. Legal basis: {PROVIDER}",
    }


def _annex_4(audit: AuditFigures, columns: Sequence[str]) -> dict[str, str]:
    origin, options = audit.provenance, audit.options
    draws = f"{count(options.get('n_boot', 0))} bootstrap replicates, seed {options.get('seed', 0)}"
    made = f"fairhead {origin.get('version', '')}; {level(audit.level)} intervals, {draws}."
    overall = [e for e in audit.estimates if e.group_by is None and e.value is not None]
    figures = ", ".join(f"{metric_name(e.metric)} {with_interval(e)}" for e in overall)
    known = {metric_name(e.metric): e.detail.get("definition") for e in audit.estimates}
    return {
        "1 General description": PROVIDER,
        "2 Elements and development": PROVIDER,
        "2(g) Validation, testing and metrics": f"{made} Command: {origin.get('command', 'not recorded')}",
        "3 Capabilities and limits, for groups": f"{figures}. Accuracy: {_rates(audit, columns, 'accuracy')}.",
        "4 Appropriateness of the metrics": "; ".join(f"{name}: {text}" for name, text in known.items() if text) + ".",
        "5 Risk management": PROVIDER,
        "6 Changes over the lifecycle": PROVIDER,
        "7 Harmonised standards": PROVIDER,
        "8 Declaration of conformity": PROVIDER,
        "9 Monitoring after placing on the market": PROVIDER,
    }


def _facts(title: str, facts: dict[str, str], *more: PlainTable) -> PlainTables:
    rows = [(name, text[:1].upper() + text[1:] if text.startswith(_OPEN[:8]) else text) for name, text in facts.items()]
    table = PlainTable(caption="", columns=("Heading", "Entry"), rows=rows, words=True)
    return PlainTables(title=title, tables=[table, *more])


def _sizes(audit: AuditFigures, columns: Sequence[str]) -> str:
    return "; ".join(
        f"{name}: " + ", ".join(f"{row.group} {count(row.n)}" for row in rows)
        for name, rows in audit.groups().items()
        if name in columns
    )


def _rates(audit: AuditFigures, columns: Sequence[str], rate: str) -> str:
    """One rate of each group with its interval."""
    found = []
    for row in audit.by_group:
        figure = row.rates.get(rate)
        if row.group_by in columns and figure is not None and figure.value is not None:
            found.append(f"{row.group} {with_interval(figure)}")
    return "; ".join(found) or "of each class, in the JSON of the audit"


def _findings(audit: AuditFigures) -> list[PlainTable]:
    """Gaps whose intervals leave 0 out, and ratios that fail, as a table; none where there are none."""
    found = [(e, said(e, audit.level)) for e in audit.estimates if e.group_by is not None and e.value is not None]
    rows = [
        (metric_name(e.metric), str(e.group_by), with_interval(e), "; ".join(filter(None, [word, left_out(e)])))
        for e, word in found
        if word in ("larger than 0", "four-fifths rule: fails")
    ]
    columns = ("Figure", "By", f"Value, {level(audit.level)} interval", "Finding")
    table = PlainTable(caption="10(2)(f) Examination for bias", columns=columns, rows=rows, words=True)
    return [table] if rows else []
