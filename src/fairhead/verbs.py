"""The verbs in Python: each takes a model and data, and returns a result.

A model is a folder, a hub name in the local cache, or an `nn.Module`. If a module was not loaded from a folder, pass
its tokenizer or image processor as `beside`. Data are anything that `fairhead.dataset` accepts: "reader:path", a
`Dataset`, a pandas DataFrame, ... The device "auto" is a GPU if there is one.
"""

import copy
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairhead.data import Dataset, Items, dataset, hold, parse_spec
from fairhead.data.own import NO_LABEL
from fairhead.errors import InputError, check_known
from fairhead.records import Records
from fairhead.settings import check_settings

if TYPE_CHECKING:
    import pandas as pd

    from fairhead.bench.one_run import Mitigated
    from fairhead.discover.discovered import Discovered
    from fairhead.language.benchmark import BenchmarkResult
    from fairhead.locate.located import Located
    from fairhead.mitigate.language_result import MitigatedLanguage
    from fairhead.models.inputs import Predictions


def predict(
    model: Any,
    data: Any,
    *,
    part: str | None = None,
    batch_size: int = 64,
    device: str = "auto",
    beside: Any = None,
    **options: Any,
) -> "Predictions | pd.DataFrame":
    """Predict with a classifier of pictures or texts, and return records for `fairhead.audit`.

    Args:
        model: the classifier.
        data: pictures or texts with labels (all classes of the model or some of them), or without labels
            (`label="none"`, or a plain list). Without labels, the result is a DataFrame of id, prediction and score.
        part: the rows to predict. The default is "test". It is "all" if there are no labels, or if the split is random
            and the training rows of the model are unknown. Rows that `mitigate` trained the model on are left out of a
            test part, and a warning gives their number.
        batch_size: rows per batch.
        device: device to run on.
        beside: tokenizer or image processor of a model object.
        options: options of `fairhead.dataset`, if `data` are not a data set yet: label, groups, ...

    Example:
        >>> records = predict("run/model", "images:labels.csv", label="smiling", groups=["sex"])  # doctest: +SKIP
        >>> fairhead.audit(records).show()  # doctest: +SKIP
        >>> predict("run/model", ["A new post.", "Another."])  # doctest: +SKIP
    """
    import torch

    from fairhead.models.inputs import ImageInputs, Predictions, TextInputs
    from fairhead.models.places import origin, training_rows, unseen

    if isinstance(data, Sequence) and not isinstance(data, str):
        options = {"label": NO_LABEL, **options}
    rows = _dataset(data, options, labelled=False)
    if part is None:
        part, drawn = "test", bool(rows.classes) and rows.provenance.get("split", "") is None
        if drawn and not training_rows(model):
            part, told = "all", "predicting all %s rows; it is unknown which of them the model was trained on"
            logging.getLogger("fairhead").warning(told, f"{len(rows):,}")
    asked = rows.all if part == "all" else rows.examples(part)
    asked = unseen(model, asked, go_on=part in ("all", "train", "val") or not rows.classes)
    kind = TextInputs if isinstance(asked.inputs, tuple) else ImageInputs
    inputs = kind(model, asked.inputs, batch_size, device, beside)
    with torch.inference_mode():
        logits = torch.cat([found.cpu() for found in inputs.logits()])
    records, made_by = Predictions.of(inputs.model, rows, asked.ids, logits), origin(model)
    records = replace(records, provenance={**records.provenance, **({"model": made_by.name} if made_by else {})})
    return records if rows.classes else records.to_frame().drop(columns="label")


def score(
    model: Any,
    benchmark: str,
    data: Any,
    *,
    limit: int | None = None,
    out: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    start: str = "default",
    chat: bool = False,
    device_map: str | None = None,
    load_in: str | None = None,
    engine: str = "transformers",
    tokenizer: Any = None,
    n_boot: int | None = None,
    seed: int = 0,
    level: float = 0.95,
    **options: Any,
) -> "BenchmarkResult":
    """Score a causal language model on a benchmark: "crows", "stereoset", "bbq", "winobias", ...

    Args:
        model: the language model.
        benchmark: name of the benchmark.
        data: its published files, "reader:path", or your own pairs or triplets (`fairhead.dataset`).
        limit: use only this many items, drawn at random.
        out: a folder that stores each answer, so that an interrupted run can continue.
        device: device to run on.
        dtype: "float32", "bfloat16", "float16" or "auto".
        start: token that texts start with: "bos", "eos", "none" or a token; "default" is BOS, or EOS without a BOS.
        chat: apply the tokenizer's chat template to prompts and score the answer.
        device_map: how to spread layers over several GPUs: "auto", "balanced" or "sequential".
        load_in: "8bit" or "4bit" quantization (bitsandbytes, on a GPU).
        engine: "vllm" computes log-probabilities with vLLM, if it is installed.
        tokenizer: tokenizer of a model object.
        n_boot: bootstrap replicates; None for the benchmark's default.
        seed: random seed.
        level: confidence level.
        options: options of the benchmark, such as `prompt` of BBQ.

    Example:
        >>> score("hub:HuggingFaceTB/SmolLM2-135M", "crows", "pairs:own.csv")["ss"].value  # doctest: +SKIP
        0.61
    """
    from fairhead.language import load_scorer
    from fairhead.language.benchmarks import benchmark_named
    from fairhead.language.running import read_data, run_benchmark
    from fairhead.stats.bootstrap import Resampling

    chosen, out = benchmark_named(benchmark), None if out is None else Path(out)
    _parted(options, [f.name for f in fields(chosen.options)], (), chosen.name, data)
    how = Resampling(chosen.n_boot if n_boot is None else n_boot, seed, level)
    data = data if isinstance(data, str | Path | Items | Dataset) else dataset(data)
    spec = hold(data) if isinstance(data, Items | Dataset) else data
    chosen, items = read_data(chosen, spec, chosen.chosen(**options), limit, seed, model=model)
    by: Mapping[str, Any] = {"dtype": dtype, "device_map": device_map, "load_in": load_in, "engine": engine}
    scorer = load_scorer(model, device=device, start=start, chat=chat, tokenizer=tokenizer, **by)
    name = str(model) if isinstance(model, str | Path) else type(model).__name__
    return run_benchmark(chosen, scorer, items, out=out, limit=limit, resampling=how, model=name, **options)


def discover(
    data: Any,
    encoder: Any,
    *,
    label: str | None = None,
    groups: Sequence[str] = (),
    model: Any = None,
    part: str = "test",
    clusters: int | None = None,
    words: str | Path | None = None,
    max_length: int = 128,
    seed: int = 0,
    device: str = "auto",
    cache: str | Path | None = None,
    out: str | Path | None = None,
    beside: Any = None,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> "Discovered":
    """Find groups without labels: clusters of an encoder's features, their typical rows, and a model's gaps.

    Args:
        data: labelled pictures or texts.
        encoder: any model, without its task head: a folder, a hub name or a model object; or "features:FILE.npz".
        label: the column of the classes, if `data` do not define it.
        groups: group columns to compare the clusters with; they are not used to find them.
        model: a classifier to audit by cluster, or its `Records`, or the path to its records.
        part: the rows to audit the model on, or "all".
        clusters: number of clusters; by default the one on which two halves of the rows agree best.
        words: .npz with texts and their vectors in the feature space, such as those of CLIP's text encoder.
        max_length: truncate texts to this many tokens.
        seed: random seed.
        device: device to run on.
        cache: folder for decoded pictures and features.
        out: folder for groups.csv, report.html and discovered.json; None writes nothing.
        beside: tokenizer or image processor of an encoder object.
        progress: called with (stage, done, total).
        options: more options of `fairhead.dataset`, such as id and person.

    Example:
        >>> found = discover("images:labels.csv", "dinov2-small", label="smiling", out="found")  # doctest: +SKIP
        >>> found.show()  # doctest: +SKIP
        >>> fairhead.locate("run/model", found.dataset, by="discovered")  # doctest: +SKIP
    """
    from fairhead.discover.clustering import features_of, group
    from fairhead.discover.discovered import describe
    from fairhead.models.load import in_folder

    held = hold(data) if isinstance(data, Dataset) else data
    labelled = _dataset(held, {"label": label, "groups": tuple(groups), **options})
    with in_folder(encoder, beside) as name:
        features = features_of(name, labelled, max_length=max_length, device=device, cache=cache, progress=progress)
    grouping = group(labelled, features, clusters, words, seed)
    records = None if model is None else _records(model, labelled, part, device, features)
    asked = {"data": data, "encoder": encoder, "model": model, "part": part, "clusters": clusters, "words": words}
    result = describe(labelled, grouping, records, {**asked, "seed": seed})
    if out is not None:
        result.save(out)
    return result


def _records(model: Any, data: Dataset, part: str, device: str, features: Any) -> Records:
    """A classifier's answers for a part of the data, or its records; a linear head takes the features [n, D] of all."""
    from fairhead.models import load
    from fairhead.models.attached import LinearHead, LinearHeadConfig
    from fairhead.models.inputs import Predictions
    from fairhead.models.places import config_of, find, unseen

    named = isinstance(model, str | Path)
    if isinstance(model, Records):
        return model
    if named and Path(model).is_file():
        return Records.read(model)
    if not isinstance(config_of(find(model)) if named else model, LinearHead | LinearHeadConfig):
        records = predict(model, data, part=part, device=device)
        assert isinstance(records, Records)
        return records
    head: Any = load(model)
    if head.config.hidden_size != features.shape[1]:
        raise InputError(
            f"the model is a linear head on {head.config.hidden_size} features, but the encoder has "
            f"{features.shape[1]}: give the encoder that it was trained on"
        )
    ids = unseen(model, data.all if part == "all" else data.examples(part), go_on=part == "all").ids
    return Predictions.of(head, data, ids, head(features=features[data.attributes.rows(ids)]).logits.detach())


def locate(
    model: Any,
    data: Any,
    by: str | None = None,
    *,
    label: str | None = None,
    heads: int = 4,
    features: str | Path | None = None,
    beside: Any = None,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> "Located[Any]":
    """Find the heads that contribute to a gap, how certain that is, and what happens when they change.

    Args:
        model: an image model, a text classifier or a causal language model.
        data: labelled pictures or texts, or pairs or triplets of sentences.
        by: the group column (for published faces also "gender" or "age"); for pairs the category, None for all.
        label: the column of the classes, if `data` do not define it.
        heads: maximum number of heads to select.
        features: a folder that stores the heads' contributions for later questions, of any model and data.
        beside: tokenizer or image processor of a model object.
        progress: called with (stage, done, total).
        options: settings of the analysis: forward, rank, draws, n_boot, limit, seed, device, ...

    Example:
        >>> found = locate("run/model", "images:labels.csv", by="sex", label="smiling", forward=True)  # doctest: +SKIP
        >>> found.show()  # doctest: +SKIP
        >>> if found.heads:  # empty if no head is significant  # doctest: +SKIP
        ...     found.save("edited")  # the model without these heads' contribution
    """
    from fairhead.locate.engine import answer
    from fairhead.locate.locate_settings import LocatePlan, Source
    from fairhead.models.load import device_named

    of_source = [f.name for f in fields(Source) if f.name not in ("model", "data", "concept", "task", "beside")]
    for_source, for_plan = _parted(
        options, of_source, [f.name for f in fields(LocatePlan) if f.name != "count"], "locate", data
    )
    held = data if isinstance(data, Dataset | Items | str) else dataset(data, label=label, groups=(by,) if by else ())
    if isinstance(model, str | Path):
        model = str(model)
    else:  # the caller's own stays as it is
        model = copy.deepcopy(model).float().to(device_named(options.get("device", "auto")))
    spec = held if isinstance(held, str) else hold(held)
    task = label or ("label" if isinstance(held, Dataset) else None)
    source, plan = Source(model, spec, by, task, beside=beside, **for_source), LocatePlan(count=heads, **for_plan)
    return answer(source, plan, features=None if features is None else str(features), progress=progress)


def mitigate(
    model: Any,
    data: Any = None,
    method: Any = "erm",
    *,
    against: str | None = None,
    out: str | Path | None = None,
    label: str | None = None,
    groups: Sequence[str] = (),
    seed: int = 0,
    beside: Any = None,
    progress: Callable[[str, int, int, str], None] | None = None,
    **options: Any,
) -> "Mitigated | MitigatedLanguage":
    """Train a model with a method that reduces gaps without using groups, then audit it on held-out rows.

    Args:
        model: a classifier ("vit-8x8" is a new one, layers × heads), or a language model for methods such as KLAAD.
        data: labelled pictures or texts in three parts; for language models triplets or pairs, or a list of those.
        method: a name, or settings (`fairhead.DAM(momentum=0.2)`); the name "klaad" uses the weights of the family.
        against: for classifiers, another method to train and compare with; "erm" is plain training.
        out: folder for the model, its records, the audit and a report; None uses a temporary folder.
        label: the column of the classes, if `data` do not define it.
        groups: group columns for the audit, which training never sees; for pairs and triplets the category column.
        seed: seed of weights, batches and a random split.
        beside: tokenizer or image processor of a model object.
        progress: called with (stage, done, total, note).
        options: settings of the plan (epochs, learning_rate, ...) and of the run (`fairhead.bench.grid.RunSettings`);
            for language models held_out, bias_type, kind, limit, split_seed, lora, start, checks, device.

    Example:
        >>> run = mitigate("vit-8x8", "utkface:UTKFace.zip", "dam", against="erm", out="run")  # doctest: +SKIP
        >>> run.show()  # doctest: +SKIP
        >>> run.model  # doctest: +SKIP
        >>> mitigate("smollm", "pairs:own.csv", fairhead.KLAAD(), out="klaad").to_frame()  # doctest: +SKIP
    """
    from fairhead.bench.grid import PLAN_FIELDS, RUN_PLAN, Method, RunSettings
    from fairhead.bench.one_run import mitigate as run
    from fairhead.mitigate import method_named, named_settings
    from fairhead.models.load import device_named, in_folder

    name, settings = named_settings(method)
    if method_named(name).kind == "language":
        for argument, value in (("against", against), ("label", label)):
            if value is not None:
                raise InputError(f"{argument} is for classifiers, but {name} changes a language model: leave it out")
        options |= {"seed": seed}
        return _change_language(model, data, method, groups, options, out, tokenizer=beside, progress=progress)
    of_run, of_plan = _parted(options, [f.name for f in fields(RunSettings)], PLAN_FIELDS, "mitigate", data)
    how = RunSettings(against=against, **of_run)
    check_settings(RunSettings, vars(how), "mitigate")
    if isinstance(data, str):
        spec, groups = data, how.groups_to_read(data, groups)
        given = {name: value for name, value in (("label", label), ("groups", tuple(groups))) if value}
    else:
        held = _dataset(data, {"label": label, "groups": tuple(groups)})
        spec, given = hold(held), {}
    with in_folder(model, beside) as folder:
        first, plan = groups[0] if groups else None, {**RUN_PLAN, **of_plan}
        of_reader, chosen = parse_spec(spec).reader.named(given), Method(name, name, settings)
        cell = how.cell(folder, spec, chosen, of_reader, first, plan, seed)
        kept = Path(tempfile.mkdtemp(prefix="fairhead-") if out is None else out)
        return run(cell, kept, against, str(device_named(how.device)), how.cache, progress)


def _change_language(
    model: Any, data: Any, method: Any, groups: Sequence[str], options: Mapping[str, Any], out: Any, **how: Any
) -> "MitigatedLanguage":
    from fairhead.mitigate import method_named, named_settings
    from fairhead.mitigate.language_trainer import LanguageRun, mitigate_language, plan_of
    from fairhead.mitigate.triplets import TripletData
    from fairhead.train import LanguagePlan

    name, settings = named_settings(method)
    kind = method_named(name).load()
    trains, reads = hasattr(kind, "session"), not hasattr(kind, "attach")
    of_plan = [f.name for f in fields(LanguagePlan)] if trains else ["seed"]
    of_data = ["held_out", "bias_type", "kind", "limit", "split_seed"] if reads else []
    for_plan, for_data = _parted(options, of_plan, [*of_data, "device"], name, data)
    device, triplets = str(for_data.pop("device", "auto")), None
    if reads and data is not None:
        several = data if isinstance(data, list | tuple) and all(isinstance(o, str | Items) for o in data) else [data]
        ready = (str, Items, Dataset)
        held = [one if isinstance(one, ready) else dataset(one, groups=tuple(groups)) for one in several]
        specs = [one if isinstance(one, str) else hold(one) for one in held]
        of_reader: dict[str, Any] = {}
        for reader in (parse_spec(one).reader for one in held if isinstance(one, str)):
            named = reader.named({"groups": tuple(groups)}).items()
            of_reader |= {name: value for name, value in named if len(specs) == 1 or name in reader.options}
        of_triplets = {"seed" if option == "split_seed" else option: value for option, value in for_data.items()}
        triplets = TripletData(specs, **of_triplets, options=of_reader)
    run = LanguageRun(name, settings, plan_of(kind, **for_plan) if trains else None)
    kept = Path(tempfile.mkdtemp(prefix="fairhead-") if out is None else out)
    return mitigate_language(model, triplets, kept, {"": run}, device=device, **how)


def _dataset(data: Any, options: Mapping[str, Any], labelled: bool = True) -> Dataset:
    found = data if isinstance(data, Dataset) else dataset(data, **options)
    if not isinstance(found, Dataset):
        raise InputError(f"{found.name} has no labels; expected labelled pictures or texts")
    if labelled:
        found.need_labels()
    return found


def _parted(
    options: Mapping[str, Any], one: Sequence[str], other: Sequence[str], verb: str, data: Any
) -> list[dict[str, Any]]:
    """The options of one kind, and those of another; some are of both, and what is neither is refused."""
    for name in options:
        of_reader = isinstance(data, str) and not Path(data).exists() and name not in (*one, *other)
        if of_reader and name in parse_spec(str(data)).reader.options:
            read = f"fairhead.dataset({data!r}, {name}=...)"
            raise InputError(f"{verb} has no option {name!r}, which says how data are read: give {read} as data")
        check_known(name, [*one, *other], f"{verb} has no option {name!r}; it has")
    return [{k: v for k, v in options.items() if k in names} for names in (one, other)]
