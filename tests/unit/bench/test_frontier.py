"""Names in the picture of fairness and accuracy."""

from itertools import combinations

from fairhead.report.sections.bench_block import _APART, _BOTTOM, _TOP, _WIDTH, _box, _places


def test_names_of_crowded_points_stand_apart_and_inside():
    points = [
        (90.0, 100.0, "erm"),
        (91.0, 96.0, "dam"),
        (99.0, 103.0, "scaling"),
        (90.5, 104.0, "jtt"),
        (1.0, 20.0, "x"),
    ]
    places = _places(points)
    boxes = [_box(x * _WIDTH / 100, y, name, place) for (x, y, name), place in zip(points, places, strict=True)]
    assert not any(a.meets(b) for a, b in combinations(boxes, 2))
    assert all(box.left >= 0 and box.right <= _WIDTH for box in boxes)
    assert places[4] not in _APART  # alone: beside its point
    assert any(place in _APART for place in places)


def test_a_name_at_the_upper_edge_or_above_the_axis_is_not_cut_off():
    points = [(50.0, float(_TOP), "erm"), (20.0, float(_BOTTOM), "dam")]
    upper, lower = (_box(x * _WIDTH / 100, y, name, p) for (x, y, name), p in zip(points, _places(points), strict=True))
    assert upper.top >= 0
    assert lower.bottom <= _BOTTOM
