"""The sections of a report that only located heads have."""

import pytest

from fairhead.errors import InputError
from fairhead.report import render

PIXEL = "data:image/png;base64,iVBORw0KGgo="


def report(**section):
    return {
        "schema": "fairhead.report/1",
        "title": "T",
        "question": "Q",
        "verdict": [],
        "sections": [{"title": "S", **section}],
        "provenance": {},
    }


def curve(value=0.1):
    points = [{"name": "no head", "value": 0.25}, {"name": "+ <L1H2>", "value": value}]
    return report(kind="curve", panels=[{"metric": "DP", "points": points}])


def heads(**head):
    facts = [{"name": "Cohen's d", "figure": "1.8", "note": "1.2 to 2.4"}]
    texts = [{"text": "<lady>", "share": 0.07, "attribute": True}, {"text": "hat", "share": 0.02, "attribute": False}]
    card = {"head": [10, 5], "facts": facts, "texts": texts, "most": [PIXEL], "least": [], **head}
    return report(kind="top_heads", poles=["female", "male"], heads=[card])


def test_a_curve_has_a_row_a_step() -> None:
    page = render(curve())
    assert "+ &lt;L1H2&gt;" in page
    assert "25.0" in page
    assert "10.0" in page
    assert "No figure of the curve" not in page
    # An undefined step is left out, not drawn at 0.
    assert "+ &lt;L1H2&gt;" not in render(curve(None))


def test_a_head_card_shows_texts_and_pictures_escaped() -> None:
    page = render(heads())
    assert "<h3>L10H5</h3>" in page
    assert "<strong>&lt;lady&gt;</strong>" in page
    assert f'<img src="{PIXEL}"' in page
    assert "most female" in page
    assert "most male" not in page
    assert "No head was chosen" in render(report(kind="top_heads", poles=["a", "b"], heads=[]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"most": ["https://example.org/x.png"]}, r"heads\[0\].most\[0\] is not a picture"),
        ({"head": [10]}, r"heads\[0\].head is \[10\]"),
        ({"texts": [{"text": "a", "share": None, "attribute": True}]}, "share"),
    ],
)
def test_what_is_not_of_the_form_is_refused(change, message) -> None:
    with pytest.raises(InputError, match=message):
        render(heads(**change))
