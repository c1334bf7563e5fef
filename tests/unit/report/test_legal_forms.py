"""Forms that laws ask for, filled from audits of made tables whose figures are known."""

import numpy as np
import pytest

import fairhead
from fairhead.cli import main
from fairhead.errors import InputError
from fairhead.report import render
from fairhead.report.legal_forms import eu_ai_act, local_law_144

# By sex and race: applicants and selected. The last race has fewer than 2 % of the applicants.
APPLICANTS = {
    ("Female", "White"): (400, 200),
    ("Female", "Black"): (400, 120),
    ("Female", "Other"): (8, 8),
    ("Male", "White"): (500, 300),
    ("Male", "Black"): (300, 120),
    ("Male", "Other"): (10, 9),
}


def records():
    sex, race, said = [], [], []
    for (a, b), (n, selected) in APPLICANTS.items():
        sex, race = sex + [a] * n, race + [b] * n
        said += [1] * selected + [0] * (n - selected)
    label = np.random.default_rng(0).integers(0, 2, len(said))
    return fairhead.Records.from_arrays(label, said, groups={"sex": sex, "race": race})


def tables(report):
    return {table.caption: {row[0]: row[1:] for row in table.rows} for table in report.sections[1].tables}


def test_impact_ratios_are_those_of_the_law():
    found = tables(local_law_144(fairhead.audit(records(), intersections=True, min_cell=1, n_boot=200)))
    assert list(found) == ["By sex", "By race", "By sex × race"]
    female, male = 328 / 808, 429 / 810
    assert found["By sex"]["Female"][0] == "808"
    assert found["By sex"]["Female"][2] == "328"
    assert found["By sex"]["Female"][4] == f"{female / male:.2f}"
    assert found["By sex"]["Male"][4] == "1.00"
    # Others, nearly all of them selected, are fewer than 2 %: no ratio is measured against them.
    assert found["By race"]["White"][4] == "1.00"
    assert found["By race"]["Black"][4] == f"{(240 / 700) / (500 / 900):.2f}"
    assert found["By race"]["Other"][4] == "left out: below 2 %"
    assert found["By race"]["Other"][:1] + found["By race"]["Other"][2:3] == ("18", "17")
    crossed = found["By sex × race"]
    assert crossed["Female × Black"][4] == f"{0.3 / 0.6:.2f}"
    assert "interval" in local_law_144(fairhead.audit(records(), intersections=True)).sections[1].tables[0].columns[4]


def test_the_verdict_names_ratios_below_four_fifths():
    report = local_law_144(fairhead.audit(records(), intersections=True, n_boot=200))
    assert report.verdict[0].tone == "bad"
    assert "Black 0.62" in report.verdict[0].text
    assert "Other" not in report.verdict[0].text


def test_scores_are_judged_by_their_median(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    sex, race = rng.choice(["f", "m"], 500), rng.choice(["a", "b"], 500)
    score = rng.normal(0, 1, 500).round(3) + 0.5 * (sex == "m")
    lines = [
        "y,s,sex,race",
        *(f"{i % 2},{s:.3f},{a},{b}" for i, (s, a, b) in enumerate(zip(score, sex, race, strict=True))),
    ]
    lines += ["1,0.5,,a", "0,0.1,f,"]
    score, sex = np.append(score, [0.5, 0.1]), np.append(sex, ["", "f"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.csv").write_text("\n".join(lines) + "\n")
    columns = ["--label", "y", "--score", "s", "--threshold", "median", "--group", "sex", "--group", "race"]
    written = ["--intersections", "--drop-missing", "--ll144", "law.html", "--eu-ai-act", "sheet.html"]
    assert main(["audit", "jobs.csv", *columns, *written]) in (0, None)
    capsys.readouterr()
    page = (tmp_path / "law.html").read_text("utf-8")
    above = {group: 100 * (score[sex == group].round(3) > np.median(score.round(3))).mean() for group in "fm"}
    for value in above.values():
        assert f"{value:.1f}" in page
    assert "Scoring rate" in page
    assert "1 (sex), 1 (race), 2 (sex × race)" in page, "two persons of an unknown sex or race are counted"
    assert "median" in (tmp_path / "sheet.html").read_text("utf-8")


def test_the_fact_sheet_says_what_it_cannot_know():
    audit = fairhead.audit(records(), n_boot=200)
    report = eu_ai_act(audit)
    entries = [row for section in report.sections for row in section.tables[0].rows]
    assert [name.split()[0] for name, _ in entries][:3] == ["10(2)(a)", "10(2)(b)", "10(2)(c)"]
    assert len(entries) == 11 + 10
    facts = dict(entries)
    assert facts["10(2)(f) Examination for bias"] == "See the table below."
    _, findings = report.sections[0].tables
    assert findings.caption.startswith("10(2)(f)")
    assert findings.rows[0][:2] == ("Demographic parity gap", "sex")
    assert all(
        len(row) == 4 and row[3].startswith(("larger than 0", "four-fifths rule: fails")) for row in findings.rows
    )
    nothing = eu_ai_act(fairhead.audit(records(), n_boot=200, metrics=["accuracy"]))
    assert len(nothing.sections[0].tables) == 1
    assert "Other (race) has 18 rows" in facts["10(2)(h) Gaps and shortcomings"]
    assert facts["5 Risk management"] == "Not part of an audit; to be filled in by the provider."
    assert "None" not in render(report)


@pytest.mark.parametrize(
    ("options", "says"), [({}, "add --intersections"), ({"intersections": True, "several": True}, "--positive")]
)
def test_an_audit_that_does_not_fit_is_refused(options, says):
    made = records()
    if options.pop("several", False):
        rng = np.random.default_rng(0)
        groups = {name: column.values() for name, column in made.groups.items()}
        made = fairhead.Records.from_arrays(*rng.integers(0, 3, (2, len(made))), groups=groups)
    with pytest.raises(InputError, match=says):
        local_law_144(fairhead.audit(made, n_boot=100, **options))


def test_weights_are_no_applicants(tmp_path):
    frame = records().to_frame().assign(w=1.5)
    frame.to_csv(tmp_path / "a.csv", index=False)
    names = {"label": "label", "prediction": "prediction", "groups": ["sex", "race"], "weight": "w"}
    found = fairhead.audit(fairhead.Records.read(tmp_path / "a.csv", **names), n_boot=100, intersections=True)
    with pytest.raises(InputError, match="audit without --weight"):
        local_law_144(found)
    shortcomings = dict(eu_ai_act(found).sections[0].tables[0].rows)["10(2)(h) Gaps and shortcomings"]
    assert "Female × Other (sex × race) has 8 rows" in shortcomings


def test_an_entry_names_a_dozen_small_groups_and_counts_the_rest():
    group = np.array([f"g{k:02}" for k in range(20)] + ["large"])[np.minimum(np.arange(400) // 2, 20)]
    group[0] = "alone"
    found = fairhead.audit(
        fairhead.Records.from_arrays(np.arange(400) % 2, np.arange(400) % 3 % 2, groups={"g": group}), n_boot=100
    )
    entry = dict(eu_ai_act(found).sections[0].tables[0].rows)["10(2)(h) Gaps and shortcomings"]
    assert "alone (g) has 1 row;" in entry
    assert entry.count("(g) has") == 12
    assert "9 more groups have fewer than 30 rows (in the JSON)" in entry
