"""Every benchmark on one model, into one folder that holds all that a comparison needs. Needs no torch itself.

The folder has `suite.json` (which model, which data, what was left out and why), for each benchmark a table of items
(`crows_pairs.items.jsonl`) and its figures (`crows_pairs.json`), and the journals from which a killed run goes on.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from fairhead import __version__
from fairhead.errors import InputError, UnsupportedModel, did_you_mean
from fairhead.language.entries import ENTRIES, Entry, NotMeasured, SuiteOptions, Work
from fairhead.language.resampling import Resampling
from fairhead.language.results import BenchmarkResult, result_of
from fairhead.language.run import measures_of
from fairhead.language.scores import Progress
from fairhead.language.tables import ItemTable, StoredItems, read_items
from fairhead.language.training_record import FILE as TRAINING_FILE
from fairhead.language.training_record import TrainingRecord
from fairhead.store import made_folder, write_json

SCHEMA = "fairhead.suite/1"
FILE = "suite.json"
# Of the record of a training: what tells which items a comparison may use, and how the model came about.
_OF_TRAINING = ("method", "settings", "plan", "data", "base", "training_targets", "held_out_targets")

Report = Callable[[str, int, int], None]


@dataclass
class Suite:
    """What has been run, and what has not.

    Attributes:
        folder: where it lies.
        model: path of the model.
        settings: what scores depend on: digest of the weights, precision, start token.
        training: what the model's folder says about its training; None where it says nothing.
        options: of the suite.
        done: benchmark -> items, seconds, and what was left out.
        skipped: benchmark -> why it was not run.
        provenance: version, command, data, device.
    """

    folder: Path
    model: str
    settings: Mapping[str, Any]
    training: Mapping[str, Any] | None
    options: Mapping[str, Any]
    done: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def write(self) -> None:
        """Write `suite.json`."""
        content = {k: v for k, v in asdict(self).items() if k != "folder"}
        write_json(self.folder / FILE, {"schema": SCHEMA, **content})

    @classmethod
    def read(cls, folder: Path) -> "Suite":
        """Read `suite.json` of a folder.

        Raises:
            InputError: there is none, or it is something else.

        Example:
            >>> Suite.read(Path("no/such/folder"))
            Traceback (most recent call last):
                ...
            fairhead.errors.InputError: no/such/folder has no suite.json; a folder that fairhead lm suite wrote is \
expected
        """
        try:
            found = json.loads((folder / FILE).read_text(encoding="utf-8"))
        except OSError:
            raise InputError(f"{folder} has no {FILE}; a folder that fairhead lm suite wrote is expected") from None
        except ValueError:
            raise InputError(f"{folder / FILE} is not JSON; run the suite again") from None
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            raise InputError(f"{folder / FILE} is not of the schema {SCHEMA}, which this version of fairhead reads")
        return cls(folder, **{k: v for k, v in found.items() if k in cls.__dataclass_fields__})

    @property
    def measured(self) -> list[str]:
        """Benchmarks whose table of items lies in the folder, whoever put it there."""
        return [entry.name for entry in ENTRIES if self._path(entry.name).is_file()]

    def table(self, name: str) -> ItemTable:
        """The items of a benchmark that was run."""
        return self.stored(name).table

    def stored(self, name: str) -> StoredItems:
        """The items of a benchmark that was run, and what they were made with."""
        return read_items(self._path(name))

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.items.jsonl"


def choose(only: Iterable[str]) -> tuple[Entry, ...]:
    """The entries that flags name; all of them where none is given.

    Example:
        >>> [entry.name for entry in choose(["crows", "attention"])]
        ['crows_pairs', 'attention_entropy', 'attention_gap']
    """
    wanted, known = list(only), list(dict.fromkeys(entry.flag for entry in ENTRIES))
    for flag in wanted:
        if flag not in known:
            raise InputError(
                f"there is no benchmark {flag!r}; there are {', '.join(known)}.{did_you_mean(flag, known)}"
            )
    return tuple(entry for entry in ENTRIES if not wanted or entry.flag in wanted)


def find_data(folder: Path, name: str) -> Path | None:
    """The folder or archive of a data set, however its name is spelled.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> (root / "CrowS-Pairs.zip").touch()
        >>> find_data(root, "crows_pairs").name
        'CrowS-Pairs.zip'
    """
    plain = name.replace("_", "")
    for path in sorted(folder.iterdir()):
        stem = path.name.lower().removesuffix(".zip").replace("-", "").replace("_", "")
        if stem == plain:
            return path
    return None


class Gathered(NamedTuple):
    """Items by benchmark, and why others are not there."""

    items: dict[str, Sequence[Any]]
    skipped: dict[str, str]


def gather_items(data: Path, options: SuiteOptions) -> Gathered:
    """Read the items of every benchmark that is there, before any model is loaded.

    A benchmark that was asked for by name must be there; others are skipped with a reason.

    Example:
        >>> gather_items(Path("nowhere"), SuiteOptions())
        Traceback (most recent call last):
            ...
        fairhead.errors.InputError: nowhere is not a folder; a folder with one folder a benchmark (stereoset, bbq, …) \
is expected
    """
    if not data.is_dir():
        raise InputError(
            f"{data} is not a folder; a folder with one folder a benchmark (stereoset, bbq, …) is expected"
        )
    found = Gathered({}, {})
    for entry in choose(options.only):
        path = find_data(data, entry.data)
        if path is not None or (entry.reads_text and options.text):
            found.items[entry.name] = entry.read(path or data, options)
            continue
        found.skipped[entry.name] = f"{data} has no {entry.data}"
        if entry.flag in options.only:
            raise InputError(f"{entry.flag}: {found.skipped[entry.name]}")
    if not found.items:
        raise InputError(f"{data}: no benchmark can be run ({'; '.join(found.skipped.values())})")
    return found


def run_suite(
    scorer: Any,
    gathered: Gathered,
    out: Path,
    model: str,
    options: SuiteOptions,
    resampling: Resampling | None = None,
    report: Report | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Suite:
    """Run benchmarks on a model into a folder. What the folder holds already is kept, unless it was made otherwise.

    Args:
        scorer: the model, as `load_scorer` returns it.
        gathered: as `gather_items` returns them.
        out: the folder.
        model: path of the model, whose record of training is kept too.
        options: of the suite.
        resampling: how intervals of single figures are made.
        report: called with a benchmark's name, what is done of it and how much there is.
        provenance: anything else worth keeping.

    Raises:
        InputError: the folder holds the scores of another model.

    Example:
        >>> import tempfile
        >>> from fairhead.data.crows_pairs import CrowsPair
        >>> from fairhead.language.scores import Score, Scores
        >>> class Constant:
        ...     def score(self, requests, **options):
        ...         return Scores({request.id: Score(request.id, -1.0, 1) for request in requests})
        ...     def settings(self):
        ...         return {"weights": "none"}
        >>> pairs = [CrowsPair(str(i), "She cried.", "He cried.", "stereo", "gender", ()) for i in range(20)]
        >>> gathered = Gathered({"crows_pairs": pairs}, {"bbq": "there is no data"})
        >>> suite = run_suite(Constant(), gathered, Path(tempfile.mkdtemp()), "constant", SuiteOptions())
        >>> suite.measured, len(suite.table("crows_pairs"))
        (['crows_pairs'], 20)
    """
    how = resampling or Resampling()
    settings = scorer.settings()
    suite = _opened(out, model, settings, options)
    suite.provenance = {"version": __version__, **dict(provenance or {}), "n_boot": how.n_boot, "level": how.level}
    suite.skipped |= {name: reason for name, reason in gathered.skipped.items() if name not in suite.done}
    suite.write()
    for entry in ENTRIES:
        if entry.name not in gathered.items:
            continue
        items = gathered.items[entry.name]
        begun = time.monotonic()
        made_with = {**settings, **entry.settings(options), "items": digest(items)}
        kept = _kept(out, entry.name, made_with)
        if kept is None:
            work = Work(scorer, settings, items, out / "journals", options, _tell(report, entry.name))
            try:
                kept = entry.make(work)
            except (NotMeasured, UnsupportedModel) as reason:
                # Attention cannot be read in every model that can be scored.
                suite.skipped[entry.name] = str(reason)
                suite.write()
                continue
            kept.write(out / f"{entry.name}.items.jsonl", made_with)
            seconds = round(time.monotonic() - begun, 1)
        else:
            seconds = suite.done.get(entry.name, {}).get("seconds")
        result = result_of(kept, measures_of(kept), replace(how, min_items=entry.min_items))
        _write_result(out, replace(result, provenance={**made_with, "model_path": model, **suite.provenance}))
        left_out = {reason: len(names) for reason, names in kept.left_out.items()}
        suite.done[entry.name] = {"items": len(kept), "left_out": left_out, "seconds": seconds}
        suite.skipped.pop(entry.name, None)
        suite.write()
        if report is not None:
            report(entry.name, len(kept), len(kept))
    return suite


def digest(items: Sequence[Any]) -> str:
    """A hash of items: a table of other data must not pass for one of these.

    Example:
        >>> digest(["a", "b"]) == digest(["a", "b"]), digest(["a", "b"]) == digest(["ab"])
        (True, False)
    """
    found = hashlib.blake2b(digest_size=16)
    for item in items:
        text = repr(item).encode(errors="surrogatepass")
        found.update(f"{len(text)}\n".encode() + text)
    return found.hexdigest()


def _opened(out: Path, model: str, settings: Mapping[str, Any], options: SuiteOptions) -> Suite:
    made_folder(out)
    training = None
    if Path(model, TRAINING_FILE).is_file():
        training = {k: v for k, v in asdict(TrainingRecord.read(model)).items() if k in _OF_TRAINING}
    suite = Suite(out, model, settings, training, asdict(options))
    if (out / FILE).exists():
        before = Suite.read(out)
        differing = [k for k in settings if before.settings.get(k) != settings[k]]
        if differing:
            key = differing[0]
            raise InputError(
                f"{out} holds the scores of another model or precision ({key} {before.settings.get(key)!r}, here "
                f"{settings[key]!r}); choose another folder"
            )
        suite.done, suite.skipped = before.done, before.skipped
    return suite


def _kept(out: Path, name: str, made_with: Mapping[str, Any]) -> ItemTable | None:
    path = out / f"{name}.items.jsonl"
    if not path.exists():
        return None
    stored = read_items(path)
    return stored.table if stored.settings == json.loads(json.dumps(dict(made_with))) else None


def _tell(report: Report | None, name: str) -> Progress | None:
    if report is None:
        return None

    def tell(done: int, total: int) -> None:
        report(name, done, total)

    return tell


def _write_result(out: Path, result: BenchmarkResult) -> None:
    write_json(out / f"{result.benchmark}.json", result.to_dict())
