"""Every command with every bad value of every option: one line, exit code 2, inputs untouched, nothing left behind.

The cases are made of the commands' own options, so that a new command is covered on the day it is written: it needs a
line in `WORKS`, how it is called correctly, and its options for paths a word in `READ` or `WRITTEN`.
"""

import enum
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import sys
from functools import cache
from pathlib import Path

import pytest
import typer
from cases_language import made as made_benchmarks
from cases_locate import made as made_heads
from cases_tables import a_table
from cases_training import GRID

from fairhead.cli import app, main

HOSTILE = "no\x1b[31m\x07\n\u202ewhere"
LARGE = "9" * 30
FACES = (
    "--data",
    "fairface:{heads}/faces",
    "--concept",
    "gender",
    "--task",
    "age",
    "--device",
    "cpu",
    "--n-boot",
    "100",
)
FRESH = [f"--model-option={size}" for size in ("width=16", "mlp=16", "image_size=8", "patch_size=4")]
LM = ("--model", "{lm}/one", "--device", "cpu", "--n-boot", "100")
TRAIN = ("--model", "{lm}/one", "--device", "cpu", "--out", "out")
TRIPLETS = ("--data", "stereoset:{lm}/data/stereoset")
# A call of each command that works, and is quick.
WORKS = {
    "demo": (),
    "audit": ("{lm}/table.csv", "--label", "y", "--pred", "old", "--group", "race", "--n-boot", "100"),
    "discover": ("--data", "utkface:{heads}/utkface", "--encoder", "path:{heads}/backbone", "--device", "cpu"),
    "bench": ("{lm}/grid.yaml", "--device", "cpu"),
    "locate": ("--model", "{heads}/classifier", *FACES, "--draws", "20"),
    "ablate": ("--model", "{heads}/classifier", *FACES, "--draws", "20", "--heads", "L0H0"),
    "view": ("{lm}/before",),
    "predict": (
        *("--model", "{heads}/classifier", "--data", "fairface:{heads}/faces", "--part", "val", "--label", "age"),
        *("--device", "cpu"),
    ),
    "push": ("{lm}/one", "you/model"),
    "attention": (
        *("--model", "{heads}/classifier", "--data", "utkface:{heads}/utkface", "--part", "train", "--group", "white"),
        *("--pictures", "2", "--device", "cpu"),
    ),
    "lm stereoset": (*LM, "--data", "{lm}/data/stereoset"),
    "lm crows": (*LM, "--data", "{lm}/data/crows_pairs"),
    "lm bbq": (*LM, "--data", "{lm}/data/bbq"),
    "lm winobias": (*LM, "--data", "{lm}/data/winobias"),
    "lm perplexity": (*LM, "--data", "{lm}/data/text.txt"),
    "lm attention_entropy": (*LM, "--data", "{lm}/data/text.txt"),
    "lm attention": (*LM, "--data", "crows:{lm}/data/crows_pairs"),
    "lm bold": (*LM, "--data", "{lm}/data/bold", "--domain", "gender", "--limit", "20"),
    "lm suite": (*LM, "--data", "{lm}/data", "--only", "stereoset,bold,perplexity", "--limit", "12", "--out", "out"),
    "lm compare": ("{lm}/before", "{lm}/after"),
    "mitigate METHOD": ("erm", "--data", "utkface:{heads}/utkface", "--model", "vit-2x2", "--batch-size", "16", *FRESH),
    "mitigate klaad": (*TRAIN, *TRIPLETS),
    "mitigate balance_pairs": (*TRAIN, *TRIPLETS),
    "mitigate balance_control": (*TRAIN, *TRIPLETS),
    "mitigate cda": (*TRAIN, *TRIPLETS, "--swaps", "{lm}/swaps.txt"),
    "mitigate bias_unlearn": (*TRAIN, *TRIPLETS),
    "mitigate sentence_debias": (*TRAIN, *TRIPLETS, "--swaps", "{lm}/swaps.txt"),
    "mitigate self_debias": TRAIN,
}
# Options that name files and folders, and what a good one holds: a file or folder of `inputs`.
READ = {
    "path": "{lm}/table.csv",
    "grid": "{lm}/grid.yaml",
    "--grid": "{lm}/grid.yaml",
    "folders": "{lm}/before",
    "run": "{lm}/before",
    "model": "{lm}/one",
    "--classifier": "{lm}/one",
    "--data": None,
    "--model": "{lm}/one",
    "--against": "{heads}/classifier",
    "--encoder": "{heads}/backbone",
    "--text-encoder": "{heads}/clip",
    "--text-adapter": "{heads}/texts.npz",
    "--texts": "{heads}/texts.npz",
    "--prompts": "{lm}/grid.yaml",
    "--groups-from": "{lm}/table.csv",
    "--metrics-from": "{lm}/grid.yaml",
    "--compare": "{lm}/table.csv",
    "--words": "{lm}/data/text.txt",
    "--from": "{lm}/before/suite.json",
    "--like": "{lm}/before/suite.json",
    "--take-in": "{lm}/before",
    "--held-out-of": "{lm}/one",
    "--lexicons": "{lm}/data/lexicons",
    "--vectors": "{lm}/data/text.txt",
    "--score-only": "{lm}/table.csv",
    "--text": "{lm}/data/text.txt",
    "--neutral": "{lm}/data/text.txt",
    "--swaps": "{lm}/swaps.txt",
    "--only-heads": "{lm}/before/suite.json",
}
WRITTEN = {"--out", "--save", "--features", "--cache", "--json", "--html", "--markdown", "--ll144", "--eu-ai-act"}


@cache
def inputs():
    """Where the inputs of all cases lie, made once a process."""
    lm, heads = made_benchmarks(), made_heads()
    a_table(300).to_csv(lm / "table.csv", index=False)
    (lm / "swaps.txt").write_text("he\tshe\nman\twoman\nboy\tgirl\n")
    (lm / "grid.yaml").write_text(GRID.format(faces=heads / "utkface", methods="erm", references="", seeds=0, epochs=1))
    only = ("--only", "crows", "--device", "cpu", "--n-boot", "100")
    for name in ("before", "after"):
        main(["lm", "suite", "--model", f"{lm}/one", "--data", f"{lm}/data", "--out", f"{lm}/{name}", *only])
    return {"lm": lm, "heads": heads}


def commands():
    """Name -> command, of all that have no commands below them."""

    def below(command, name, above):
        context = command.context_class(command, info_name=name, parent=above)
        if not hasattr(command, "list_commands"):
            yield name, command
            return
        for one in command.list_commands(context):
            found = command.get_command(context, one)
            command.commands[one] = found  # made once, not for every case
            yield from below(found, f"{name} {one}".strip(), context)

    return dict(below(ROOT, "", None))


ROOT = typer.main.get_command(app)
COMMANDS = commands()


def kind_of(option):
    return option.type_descriptor.annotation


def named(option):
    return option.opts[0]


def is_path(option):
    words = ("FILE", "DIR", "PATH", "SPEC", "HEADMAP.json", "MODEL_DIR")
    return named(option) in (*READ, *WRITTEN) or option.metavar in words or kind_of(option) is Path


def bad_values(option):
    """What is wrong by its type alone."""
    kind = kind_of(option)
    if getattr(option, "is_flag", False) or is_path(option):
        return {}
    if kind is int:
        return {"text": "many", "empty": "", "fraction": "1.5"}
    if kind is float:
        return {"text": "many", "empty": "", "nan": "nan", "infinite": "-inf", "hostile": HOSTILE}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"unknown": "nonsense", "empty": "", "hostile": HOSTILE}
    if option.metavar == "KEY=VALUE":
        return {"no value": "nonsense", "no key": "=1", "broken": "a=[", "code": "a=!!python/name:os.system"}
    return {}


def odd_values(option):
    """What may be wrong, depending on what else there is."""
    kind = kind_of(option)
    if getattr(option, "is_flag", False) or is_path(option):
        return {}
    if kind in (int, float):
        return {"negative": "-1", "large": LARGE, "none": "0"}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {}
    if option.metavar == "KEY=VALUE":
        return {"unknown": "nonsense=1", "hostile": f"{HOSTILE}={HOSTILE}", "deep": "a=" + "[" * 500}
    return {"hostile": HOSTILE, "empty": "", "long": "x" * 5000}


def cases(values):
    return [
        pytest.param(name, named(option), value, id=f"{name} {named(option)} {what}")
        for name, command in COMMANDS.items()
        for option in command.params
        for what, value in values(option).items()
    ]


def options_with(values, without=()):
    """All values of an option in one case: of hundreds of options, a test each takes longer than what is tested."""
    return [
        pytest.param(name, named(option), list(found.values()), id=f"{name} {named(option)}")
        for name, command in COMMANDS.items()
        if name not in without
        for option in command.params
        if (found := values(option))
    ]


def call(name, option, value, change=lambda words: words):
    """The words of the command line: the call that works, with one option of another value."""
    words = change([word.format(**inputs()) for word in WORKS[name]])
    if not option.startswith("-"):  # arguments come first
        words[[named(one) for one in COMMANDS[name].params if not named(one).startswith("-")].index(option)] = value
    else:
        while option in words:
            del words[words.index(option) : words.index(option) + 2]
        words = [word for word in words if not word.startswith(f"{option}=")]
        words.append(f"{option}={value}")
    first, *more = name.split()
    return [first, *(word for word in more if word != "METHOD"), *words]


def tree(folder):
    """What lies in a folder, and when it was written."""
    found = {}
    for place, _, files in os.walk(folder):
        for file in files:
            if file != ".lock":  # stays: see `store.locked`
                status = os.lstat(os.path.join(place, file))
                found[os.path.join(place, file)] = (status.st_size, status.st_mtime_ns)
    return found


def _give_up(number, frame):
    signal.alarm(2)  # again, if it waits for the same once more
    raise BaseException("it waits for something that never comes")


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs a command that must be refused, and gives the line that it says."""
    roots = [*inputs().values(), tmp_path]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fairhead.cli.app", ROOT)
    capsys.readouterr()
    signal.signal(signal.SIGALRM, _give_up)

    def run(words, may_work=False, room=None):
        before = [tree(root) for root in roots]
        code, limits = 0, resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.alarm(60)  # whoever waits for a pipe waits for ever
        if room is not None:
            # Modules that are first imported here would leave bytecode cut short, on which all later runs fail.
            monkeypatch.setattr(sys, "dont_write_bytecode", True)
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            main(words)
        except SystemExit as stop:
            code = stop.code
        finally:
            signal.alarm(0)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        told = capsys.readouterr()
        if code == 0 and may_work:
            for file in tmp_path.rglob("*.json"):  # what it wrote is whole
                json.loads(file.read_text(encoding="utf-8"))
            assert not [path for path in tree(tmp_path) if ".part" in path]
            return ""
        assert code == 2, (code, told)
        after = [tree(root) for root in roots]
        if room is None:
            assert after == before
        else:  # what is whole stays, to go on from
            assert [{path: state for path, state in tree.items() if ".part" in path} for tree in after] == [{}, {}, {}]
        lines = [line for line in told.err.split("\n") if line]
        assert told.err.endswith("\n")
        assert [line.startswith("fairhead: error: ") for line in lines].count(True) == 1, told.err
        assert lines[-1].startswith("fairhead: error: "), told.err
        assert "Traceback" not in told.err
        assert all(letter.isprintable() for letter in lines[-1]), ascii(lines[-1])
        assert len(lines[-1]) < 1500, "nobody reads that much"
        return lines[-1]

    return run


def nowhere(words):
    for root in inputs().values():
        words = [word.replace(str(root), "absent") for word in words]
    return words


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WORKS if name not in ("demo", "push", "view")])
def test_the_calls_that_the_cases_are_made_of_work(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, *more = name.split()
    main([first, *(word for word in more if word != "METHOD"), *(word.format(**inputs()) for word in WORKS[name])])


def test_every_command_is_covered():
    assert set(WORKS) == set(COMMANDS), "how is it called correctly?"
    rows = re.findall(r"^\| (`.*?) \|", (Path(__file__).parents[3] / "SECURITY.md").read_text(encoding="utf-8"), re.M)
    told = {verb for row in rows for verb in re.findall(r"`([\w ]+)`", row)}
    for name, command in COMMANDS.items():
        assert {name, name.split()[0]} & told, f"{name}: SECURITY.md does not say what it reads, writes and runs"
        for option in command.params:
            known = named(option) in READ or named(option) in WRITTEN
            assert known or not is_path(option), f"{name} {named(option)}: is it read or written?"


@pytest.mark.parametrize(("name", "option", "values"), options_with(bad_values))
def test_a_value_of_the_wrong_type_is_refused_by_the_name_of_its_option(name, option, values, refused):
    for value in values:
        assert option in refused(call(name, option, value, nowhere)), value


@pytest.mark.parametrize(("name", "option", "values"), options_with(odd_values, without=["demo"]))
def test_odd_values_and_absent_inputs_are_one_line(name, option, values, refused):
    for value in values:
        refused(call(name, option, value, nowhere), may_work=name == "bench")


def unreadable(option):
    if named(option) not in READ:
        return {}
    whats = ("missing", "empty", "truncated", "folder", "garbage", "hostile", "pipe")
    return {what: what for what in whats}


def placed(what, good, folder):
    """A path that cannot be read, for a good one."""
    path = folder / f"{what}{good.suffix}"
    if what in ("missing", "hostile"):
        return folder / (HOSTILE if what == "hostile" else path.name)
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif good.is_dir() and what == "truncated":
        shutil.copytree(good, path)
        for file in sorted(path.rglob("*")):
            if file.is_file():
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        content = {"empty": b"", "garbage": b"\x00\xff\xfe{[\x1b\n" * 50}.get(what)
        whole = good.read_bytes() if good.is_file() else b'{"a": [1, 2'
        path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    return path


@pytest.mark.parametrize(("name", "option", "value"), cases(unreadable))
def test_what_cannot_be_read_is_refused(name, option, value, refused, tmp_path):
    works = [word.format(**inputs()) for word in WORKS[name]]
    given = works[works.index(option) + 1] if option in works else READ[option].format(**inputs())
    reader, _, place = given.rpartition(":")
    path = placed(value, Path(place), tmp_path)
    # Of a text, nobody can tell that it goes on.
    text = value == "truncated" and (Path(place).suffix == ".txt" or name in ("lm winobias", "audit"))
    refused(call(name, option, f"{reader}:{path}" if reader else str(path)), may_work=text)


def unwritable(option):
    if named(option) not in WRITTEN:
        return {}
    folder = (kind_of(option) is Path and option.metavar != "FILE") or option.metavar == "DIR"
    wrong = {"below a file": "file/below/it", "not there": "/proc/none/at/all", "hostile": f"file/{HOSTILE}"}
    return {**wrong, **({"a file": "file"} if folder else {"a folder": "folder", "full": "/dev/full"})}


def folders(option):
    """Those that a run fills; features and caches are shared, and who comes second waits for them."""
    return {"in use": "shared"} if named(option) in ("--out", "--save") and option.metavar != "FILE" else {}


@pytest.mark.parametrize(("name", "option", "value"), cases(folders))
def test_a_second_writer_is_told_and_changes_nothing(name, option, value, refused, tmp_path):
    (tmp_path / value).mkdir()
    with open(tmp_path / value / ".lock", "w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        assert "another run is writing to 'shared': wait for it" in refused(call(name, option, value))


# Where each command writes; those whose call that works says nothing of it.
FILES = {
    "audit": ("--json=x", "--html=x.html"),
    "locate": ("--out=x", "--json=x", "--features=x"),
    "ablate": ("--out=x", "--save=x"),
    **{name: ("--out=x", "--json=x") for name in WORKS if name.startswith("lm ") and name not in ("lm suite",)},
    "lm compare": ("--json=x", "--html=x.html", "--markdown=x"),
}
QUICK = ("audit", "locate --features", "lm stereoset --out", "mitigate klaad")
FULL = [(name, file) for name in WORKS if name not in ("push", "view") for file in FILES.get(name, ("",))]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        pytest.param(name, file, id=this, marks=() if this.startswith(QUICK) else pytest.mark.slow)
        for name, file in FULL
        for this in [f"{name} {file.partition('=')[0]}".strip()]
    ],
)
@pytest.mark.parametrize("room", [100, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_full_disk_is_one_line(name, file, room, refused, tmp_path, monkeypatch):
    """No file may have more bytes than `room`."""
    if name == "bench":
        room = 10_000  # its processes share memory through a file
    monkeypatch.setenv("FAIRHEAD_CACHE", str(tmp_path / "cache"))
    words = [word.format(**inputs()) for word in WORKS[name]] + [file] * bool(file)
    first, *more = name.split()
    told = refused([first, *(word for word in more if word != "METHOD"), *words], room=room, may_work=room > 100)
    assert not told or "cannot be written" in told


@pytest.mark.parametrize(("name", "option", "value"), cases(unwritable))
def test_what_cannot_be_written_is_refused(name, option, value, refused, tmp_path):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    told = refused(call(name, option, value))
    assert value.split("\x1b")[0].split("/")[0] in told


def changed_model(source, folder, **settings):
    """A copy of a model whose configuration asks for something else."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    towers = [tower for tower in config.values() if isinstance(tower, dict) and "num_hidden_layers" in tower]
    for part in towers or [config]:
        part.update(settings)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "model", "settings", "told"),
    [
        ("lm crows", "{lm}/one", {"num_hidden_layers": 10**9}, "asks for 1000000000 layers, which no model has"),
        ("locate", "{heads}/clip", {"num_hidden_layers": 10**9}, "asks for 1000000000 layers, which no model has"),
        ("lm crows", "{lm}/one", {"num_attention_heads": 10**9}, "config.json cannot be loaded"),
        ("lm crows", "{lm}/one", {"hidden_size": 10**9}, "cannot be loaded"),
    ],
)
def test_a_configuration_that_no_model_has_is_refused(name, model, settings, told, refused, tmp_path):
    folder = changed_model(Path(model.format(**inputs())), tmp_path / "model", **settings)
    assert told in refused(call(name, "--model", str(folder)))


def test_more_than_can_be_trained_is_refused_before_any_work(refused):
    assert "LoRA's rank is 100,000, more than the model's width" in refused(call("mitigate klaad", "--lora", "100000"))
    for model, option in (
        ("vit-1000000000x2", "width=16"),
        ("vit-2x2", "width=1000000000"),
        ("vit-2x2", "mlp=" + LARGE),
    ):
        words = call("mitigate METHOD", "--model", model)
        told = "1,000,000,000 layers: at most" if option == "width=16" else "weights, too many to train"
        assert told in refused([*words, f"--model-option={option}"])


def test_features_are_read_from_a_read_only_folder_and_made_again_where_they_are_cut_short(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = call("locate", "--features", "kept")
    main(words)
    (entry,) = (path for path in Path("kept").iterdir() if path.is_dir())
    whole = (entry / "data.bin").read_bytes()
    with monkeypatch.context() as patch:  # root may write to any folder
        patch.setattr("fairhead.train.features.made_folder", pytest.fail)
        main(words)
    for file in ("manifest.json", "data.bin"):
        path = entry / file
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        main(words)
        assert (entry / "data.bin").read_bytes() == whole


def test_a_pipe_within_a_folder_is_refused(refused, tmp_path):
    shutil.copytree(inputs()["heads"] / "utkface", tmp_path / "faces")
    picture = next(path for path in sorted((tmp_path / "faces").rglob("*")) if path.is_file())
    picture.unlink()
    os.mkfifo(picture)
    assert f"{picture.name} is a named pipe" in refused(call("discover", "--data", f"utkface:{tmp_path}/faces"))
    os.mkfifo(tmp_path / "grid.yaml")
    assert "is a named pipe" in refused(call("bench", "grid", "grid.yaml"))


def test_what_was_generated_of_few_prompts_is_kept_and_its_figures_are_undefined(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    only = ["--only=bold", "--limit=1", "--out=out", "--device=cpu", "--n-boot=100"]
    main(["lm", "suite", f"--model={inputs()['lm']}/one", f"--data={inputs()['lm']}/data", *only])
    main(["lm", "bold", *(word.format(**inputs()) for word in LM), f"--data={inputs()['lm']}/data/bold", "--limit=2"])
    assert json.loads(Path("out/bold.json").read_text(), parse_constant=pytest.fail)["benchmark"] == "bold"
    assert list(Path("out/journals").glob("bold-*.jsonl"))
