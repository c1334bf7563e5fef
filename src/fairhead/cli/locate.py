"""`fairhead locate`: which heads of a model carry a gap, how sure that is, and what happens without them."""

import enum
from typing import Annotated, Any

import typer

from fairhead.cli import locate_options as given
from fairhead.cli.data_options import DataColumns
from fairhead.cli.locate_options import CHOICE, OUTPUT, TEXT, answered, check_numbers, option
from fairhead.cli.options import options

EPILOG = """
**Examples**

    fairhead locate --model clip-vit-base-patch16 --data fairface:FairFace.zip --concept gender --task age --out heads

    fairhead locate --model dinov2-small --data celeba:CelebA --concept gender --task Attractive --limit 2000

    fairhead locate --model own/model --data images:labels.csv --label smiling --group sex --out heads

    fairhead locate --model SmolLM2-135M --data crows:crows_pairs_anonymized.csv --forward --rank effect --out heads

    fairhead locate --model toxicity-bert --data hatexplain:HateXplain --concept Women --task toxic --forward

Classes come from the model's own classifier, from prompts where it has a text side (its own tower, or
`--text-adapter` with `--text-encoder`), or else from a probe on labelled images. With `--features` the model runs over
the images once; later questions about them take seconds.

Of a language model, heads are ranked by their part in the log-odds of stereotype against anti-stereotype (`crows`,
`stereoset`; `--concept gender` takes the pairs of that type alone).

`--rank gap` goes by what each head itself writes; later layers may make up for much of that. `--rank effect` (with
`--forward`) takes each head out alone in a true forward pass: one pass a head over the data.
"""


class From(enum.StrEnum):
    """Where the concept's direction comes from."""

    auto = "auto"
    prompts = "prompts"
    means = "means"
    logistic = "logistic"
    leace = "leace"


class Ranking(enum.StrEnum):
    """What heads are ranked by."""

    gap = "gap"
    concept = "concept"
    bias = "bias"
    effect = "effect"


@options("locate")
def locate_command(
    context: typer.Context,
    model: given.ModelPath,
    data: given.Data,
    columns: DataColumns,
    concept: given.Concept = None,
    task: given.TaskColumn = None,
    limit: given.Limit = None,
    prompts: given.PromptPath = None,
    text_adapter: given.TextAdapter = None,
    text_encoder: given.TextEncoder = None,
    calibrate: given.Calibrate = False,
    texts: Annotated[
        str | None, option("--texts", "Texts for TextSpan (.npz with texts, vectors).", TEXT, "FILE")
    ] = None,
    concept_from: Annotated[
        From, option("--concept-from", "auto: prompts where there is a text side, else leace.", TEXT)
    ] = From.auto,
    orthogonal: Annotated[
        bool, option("--orthogonal/--no-orthogonal", "Take the class directions out of the concept.", TEXT)
    ] = False,
    heads: Annotated[int, option("--heads", "Heads to choose at most.", CHOICE, "N")] = 4,
    rank: Annotated[
        Ranking,
        option(
            "--rank",
            "gap: direct part in the gap; effect: what it loses without the head (with --forward); concept: separation "
            "of the groups; bias: that times coupling.",
            CHOICE,
        ),
    ] = Ranking.gap,
    evidence: Annotated[
        str | None,
        option(
            "--class",
            "Class whose evidence is looked at; by default that of the largest gap.",
            CHOICE,
            envvar="FAIRHEAD_LOCATE_CLASS",
        ),
    ] = None,
    forward: Annotated[
        bool, option("--forward/--no-forward", "Also edit the chosen heads in a true forward pass.", CHOICE)
    ] = False,
    draws: given.Draws = 200,
    n_boot: given.Replicates = 2000,
    seed: given.Seed = 0,
    device: given.Device = "auto",
    batch_size: given.BatchSize = 32,
    tf32: given.FastPasses = False,
    features: given.FeatureFolder = None,
    out: given.OutFolder = None,
    json_path: Annotated[
        str | None, option("--json", "Write JSON; - prints only JSON.", OUTPUT, "FILE", "FAIRHEAD_LOCATE_JSON")
    ] = None,
    images: given.ShowImages = True,
) -> None:
    """Map the heads of a model by their part in a gap, choose, and test them against random heads."""
    check_numbers(
        {
            "--limit": limit,
            "--heads": heads,
            "--draws": draws,
            "--n-boot": n_boot,
            "--batch-size": batch_size,
            "--seed": seed,
        }
    )
    plan: dict[str, Any] = {"count": heads, "rank": rank.value, "forward": forward}
    answered(context, columns, plan)
