"""Training by two processes, as `accelerate launch` starts them: the model of one, written by the first."""

import csv
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from several_processes import as_launched, in_processes

from fairhead.cli import main
from fairhead.records import Records

# Of a launcher without a GPU; on the CPU alone accelerate would ask for mpirun.
LAUNCH = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]


@pytest.fixture
def pictures(tmp_path):
    """Noise that is brighter where the label is 1; 70 training rows are two batches of 32 and six rows."""
    rng = np.random.default_rng(0)
    rows = [["path", "label", "sex", "split"]]
    for i, part in enumerate(["train"] * 70 + ["val"] * 20 + ["test"] * 61):
        pixels = rng.normal(90 + 60 * (i % 2), 40, (4, 4, 3)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
        rows.append([f"{i}.png", ("no", "yes")[i % 2], ("f", "m")[i // 2 % 2], part])
    with (tmp_path / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return tmp_path / "labels.csv"


def one_of_two(rank, arguments, folder, port):
    os.environ |= as_launched(rank, 2, port)
    os.chdir(folder)
    with open(f"said-{rank}", "w") as sys.stdout:
        main(arguments)
    os._exit(0)  # now and then gloo's threads never end, and the process would wait for them


def forked(arguments, folder):
    in_processes(one_of_two, arguments, folder)
    return "".join((folder / f"said-{rank}").read_text() for rank in range(2))


def launched(arguments, folder):
    command = [sys.executable, *LAUNCH, "--main_process_port", "0", "-m", "fairhead", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    said = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr
    return said.stdout


@pytest.mark.parametrize("start", [forked, pytest.param(launched, marks=pytest.mark.slow)])
def test_two_processes_train_the_model_of_one(start, pictures, tmp_path):
    shape = {"width": 8, "mlp": 8, "image_size": 4, "patch_size": 2}
    arguments = ["mitigate", "dam", "--data", f"images:{pictures}", "--label", "label", "--group", "sex"]
    arguments += ["--model", "vit-1x2", "--epochs", "2", "--batch-size", "32", "--against", "erm", "--device", "cpu"]
    arguments += [word for name, value in shape.items() for word in ("--model-option", f"{name}={value}")]
    main([*arguments, "--out", str(tmp_path / "one")])
    said = start([*arguments, "--out", "two"], tmp_path)
    assert said.count("report: two/report.html") == 1  # the second process says nothing
    assert {path.name for path in (tmp_path / "two").iterdir()} >= {"model", "records.csv", "audit.json", "report.html"}
    for name in ("records.csv", "records-erm.csv"):
        one, two = (Records.read(tmp_path / folder / name) for folder in ("one", "two"))
        np.testing.assert_allclose(two.scores, one.scores, atol=1e-3)
