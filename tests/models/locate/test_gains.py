"""Gains of heads: a planted head that carries a shortcut is turned down, and the gains are an ordinary edit."""

from made_vit import HEADS, LAYERS, PLANTED, pictures, planted_vit

from fairhead.locate.decompose import Decomposer
from fairhead.locate.directions import classifier_task, concept_from_images
from fairhead.locate.dose import learn_gains
from fairhead.locate.edits import HeadEdits
from fairhead.locate.gap_question import GapQuestion
from fairhead.locate.head_features import collect
from fairhead.locate.passes import RowPasses
from fairhead.locate.rows import Evaluation, halves_of


def batches_of(pixels, size=100):
    return lambda start=0: ({"pixel_values": pixels[i : i + size]} for i in range(start, len(pixels), size))


def asked():
    model = planted_vit()
    pixels, bright, labels = pictures()
    decomposer, task = Decomposer(model, unit=False), classifier_task(model)
    features = collect(decomposer, batches_of(pixels), len(pixels))
    rows = Evaluation(labels, task.classes, bright, ("bright", "dark"), "shade")
    choosing = halves_of(rows)
    concept = concept_from_images(features.output, bright, labels, name="shade", poles=("bright", "dark"))
    everywhere = HeadEdits.learn_everywhere(
        decomposer, batches_of(pixels[choosing])(), bright[choosing], labels[choosing]
    )
    passes = RowPasses(decomposer, lambda some: batches_of(pixels[some])(), task, everywhere)
    return GapQuestion(features, rows, task, concept, choosing=choosing, passes=passes)


def test_the_planted_head_is_turned_down_and_the_others_stay() -> None:
    """It says the brightness, of which the label knows nothing: without a group being named, it has to go."""
    question = asked()
    found = learn_gains(question, count=2)
    assert found.heads[0] == PLANTED
    assert found.values[PLANTED] < 0.5
    assert (found.values == 1).sum() >= LAYERS * HEADS - 2
    assert found.after < found.before
    gained = question.with_gains(found.values)
    before, after = gained.forward(gained.reported, "gain")([(), found.heads])
    gaps = gained.rows.take(gained.reported).figures([before, after])["evidence_gap"]
    assert abs(gaps[1]) < 0.5 * abs(gaps[0])


def test_gains_of_given_heads_leave_the_others() -> None:
    found = learn_gains(asked(), heads=[(0, 1), PLANTED])
    assert set(found.heads) <= {(0, 1), PLANTED}
    assert found.values[PLANTED] < 0.5
