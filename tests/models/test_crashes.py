"""Commands that are killed at any moment, and started again: what they leave is what they leave undisturbed."""

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time

import pytest
from cases_language import made as made_benchmarks
from cases_locate import made as made_heads
from cases_training import GRID
from safetensors.numpy import load_file

from fairhead.bench.results_folder import Store
from fairhead.language.suite import Suite

KILLS = int(os.environ.get("FAIRHEAD_KILLS", 50))  # of each command
# Starts a command in a process of its own, without the seconds that its imports take: one line in, two lines out.
SERVER = """
import json, os, sys
import torch, transformers, scipy.stats, pandas, peft
import fairhead.cli, fairhead.verbs, fairhead.bench.runner, fairhead.language.running
import fairhead.mitigate.language_trainer
for line in sys.stdin:
    process = os.fork()
    if process == 0:
        os.setsid()
        sys.stdin.close()
        for number in (1, 2):
            os.dup2(os.open("said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        fairhead.cli.main(json.loads(line))
        sys.stdout.flush()
        os._exit(0)
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


def without(content, *names):
    """JSON without what differs from run to run: times, costs, versions and the command."""
    if isinstance(content, dict):
        return {name: without(value, *names) for name, value in content.items() if name not in names}
    return [without(value, *names) for value in content] if isinstance(content, list) else content


def figures(file, *names):
    return without(json.loads(file.read_text(encoding="utf-8")), "provenance", "seconds", "cost", "made_with", *names)


def weights(folder):
    return {name: array.tolist() for name, array in load_file(folder / "model.safetensors").items()}


def of_bench(out):
    return figures(out / "table.json"), sorted(row["cell"] for row in Store(out).rows())


def of_suite(out):
    files = sorted(path for path in out.glob("*.json") if path.name not in ("report.json", "suite.json"))
    return {file.name: figures(file) for file in files}, sorted(Suite.read(out).done)


def of_classifier(out):
    rows = [(out / f"records{name}.csv").read_text() for name in ("", "-erm")]
    return rows, weights(out / "model"), figures(out / "audit.json")


def of_language_model(out):
    return weights(out)


def of_heads(out):
    return figures(out / "headmap.json"), (out / "records.csv").read_text()


def of_groups(out):
    return (out / "groups.csv").read_text(), figures(out / "discovered.json")


def commands():
    lm, heads = made_benchmarks(), made_heads()
    faces = GRID.format(faces=heads / "utkface", methods="erm, dam", references="", seeds="0", epochs=3)
    (lm / "crashes.yaml").write_text(faces)
    fresh = [f"--model-option={size}" for size in ("width=16", "mlp=16", "image_size=8", "patch_size=4")]
    few = ("--only", "stereoset,bold,perplexity", "--limit", "24", "--n-boot", "100")
    train = ("--batch-size", "16", "--epochs", "12", "--checkpoint-minutes", "0")
    return {
        "bench": (of_bench, "bench", lm / "crashes.yaml"),
        "suite": (of_suite, *("lm", "suite", "--model", lm / "one", "--data", lm / "data", *few)),
        "classifier": (
            *(of_classifier, "mitigate", "dam", "--data", f"utkface:{heads}/utkface", "--model", "vit-2x2"),
            *("--against", "erm", *train, *fresh),
        ),
        "language": (
            *(of_language_model, "mitigate", "klaad", "--model", lm / "one"),
            *("--data", f"stereoset:{lm}/data/stereoset", "--epochs", "6", "--checkpoint-minutes", "0"),
        ),
        "locate": (
            *(of_heads, "locate", "--model", heads / "classifier", "--data", f"fairface:{heads}/faces"),
            *("--concept", "gender", "--task", "age", "--draws", "20", "--n-boot", "100", "--features", "features"),
        ),
        "discover": (
            *(of_groups, "discover", "--data", f"utkface:{heads}/utkface", "--encoder", f"path:{heads}/backbone"),
            *("--cache", "cache"),
        ),
    }


class Server:
    """Runs commands in a folder, and kills them."""

    def __init__(self, folder):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "FAIRHEAD_CACHE": str(folder / "cache")}
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], cwd=folder, env=environment, stdin=-1, stdout=-1, bufsize=0
        )

    def run(self, words, kill_after=None):
        """The exit code, negative where a signal ended it, and the seconds that it took."""
        started = time.perf_counter()
        self.process.stdin.write(json.dumps([str(word) for word in words]).encode() + b"\n")
        number = int(self.process.stdout.readline())
        ended, _, _ = select.select([self.process.stdout], [], [], kill_after)
        if not ended:
            os.kill(number, signal.SIGKILL)
        return int(self.process.stdout.readline()), time.perf_counter() - started

    def __enter__(self):
        return self

    def __exit__(self, *error):
        with self.process as process:
            process.stdin.close()

    def said(self):
        return (self.folder / "said.txt").read_text()[-2000:]


def clear(root):
    for folder in ("out", "features", "cache"):
        shutil.rmtree(root / folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bench", "suite", "classifier", "language", "locate", "discover"])
def test_a_command_that_is_killed_again_and_again_ends_as_undisturbed(name, tmp_path):
    read, *words = commands()[name]
    words, chance = [*words, "--device", "cpu", "--out", "out"], random.Random(name)
    with Server(tmp_path) as server:
        for _ in range(2):  # the first reads what the system then has at hand, and takes longer
            clear(tmp_path)
            code, seconds = server.run(words)
            assert code == 0, server.said()
        expected = read(tmp_path / "out")
        kills = 0
        while kills < KILLS:
            clear(tmp_path)
            code = -1
            while code:
                code, _ = server.run(words, chance.uniform(0, 1.1 * seconds) if kills < KILLS else None)
                assert code in (0, -signal.SIGKILL), server.said()
                kills += code != 0
            assert read(tmp_path / "out") == expected, f"after {kills} kills"
            assert not [path for path in (tmp_path / "out").rglob("*") if ".part" in path.name]
    print(f"{name}: {kills} kills, {seconds:.1f} s undisturbed")
