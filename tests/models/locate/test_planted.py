"""A planted head is first whatever its layer, its strength and the seed: of a ViT, a BERT and a Llama."""

import made_language
import made_posts
import made_vit
import pytest

from fairhead.locate.decompose import Decomposer
from fairhead.locate.directions import classifier_task, concept_from_images
from fairhead.locate.engine import locate
from fairhead.locate.gap_question import GapQuestion
from fairhead.locate.head_features import collect
from fairhead.locate.head_maps import Head
from fairhead.locate.locate_settings import LocatePlan, Source
from fairhead.locate.log_odds import take_apart
from fairhead.locate.pair_question import PairQuestion
from fairhead.locate.passes import RowPasses
from fairhead.locate.rows import Evaluation
from fairhead.locate.session import open_question

PLAN = LocatePlan(n_boot=100, draws=2, count=1, kinds=("mean",), rank="effect", exact=4)


def of_vit(at, strength, seed, folder):
    model = made_vit.planted_vit(at, strength, seed)
    pixels, bright, labels = made_vit.pictures(seed=seed)
    decomposer, task = Decomposer(model, unit=False), classifier_task(model)
    features = collect(decomposer, lambda start: [{"pixel_values": pixels[start:]}], len(pixels))
    rows = Evaluation(labels, task.classes, bright, ("bright", "dark"), "shade")
    concept = concept_from_images(features.output, bright, labels, name="shade", poles=("bright", "dark"))
    passes = RowPasses(decomposer, lambda some: [{"pixel_values": pixels[some]}], task)
    return GapQuestion(features, rows, task, concept, passes=passes)


def of_bert(at, strength, seed, folder):
    made_posts.write_posts(folder, seed=seed)
    model = made_posts.planted_bert(at, strength, seed)
    data = (f"hatexplain:{folder}", "Women", "toxic")
    source = Source(model, *data, beside=made_posts.tokenizer(), device="cpu", batch_size=200)
    return open_question(source, PLAN)


def of_llama(at, strength, seed, folder):
    scorer = made_language.scorer(made_language.planted_llama(at, strength, seed))
    pairs = made_language.text_pairs(seed=seed)
    return PairQuestion(scorer, pairs, take_apart(scorer, pairs))


# How to ask, the shape of the model, a weak and a strong head.
MADE = {
    "vit": (of_vit, (made_vit.LAYERS, made_vit.HEADS), (0.3, 3.0)),
    "bert": (of_bert, (made_posts.LAYERS, made_posts.HEADS), (3.0, 12.0)),
    "llama": (of_llama, (made_language.LAYERS, made_language.HEADS), (1.0, 6.0)),
}


def missed(family, layer, strength, seeds, folder):
    asked, (_, heads), _ = MADE[family]
    for seed in seeds:
        at = Head(layer, seed % heads)
        found = locate(asked(at, strength, seed, folder), PLAN).ranked
        if found != (at,):
            yield seed, at, found


@pytest.mark.parametrize("family", MADE)
def test_a_weak_head_of_the_first_layer_is_first(family, tmp_path) -> None:
    assert list(missed(family, 0, MADE[family][2][0], [1], tmp_path)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layer", "strength"),
    [(name, layer, s) for name, (_, shape, both) in MADE.items() for layer in range(shape[0]) for s in both],
)
def test_a_planted_head_is_first_in_every_layer_whatever_the_seed(family, layer, strength, tmp_path) -> None:
    assert list(missed(family, layer, strength, range(24), tmp_path)) == []
