"""Names in the picture of fairness and accuracy."""

from itertools import combinations

from fairhead.bench.frontier import _APART, _WIDTH, _box, _places


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
