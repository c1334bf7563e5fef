"""Writes the logs of this folder with the packages themselves: lm-evaluation-harness 0.4.13 and inspect_ai 0.3.285.

    pip install lm-eval inspect_ai
    python make.py MODEL ANOTHER_MODEL     # two small causal language models

lm-evaluation-harness scores sentences of our own with both models (`--log_samples`); in inspect_ai a solver of our own
answers questions, rightly or not as a seed says, and its scorer marks the answers.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
JOBS = ("nurse", "doctor", "cook", "pilot", "teacher", "mechanic", "dancer", "farmer")
ENDS = ("was tired.", "ran home.", "laughed a lot.")
TASK = """task: made_pairs
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "The {{job}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: brier_score}]
"""


def lm_eval(models: list[str]) -> None:
    """`lm-eval-NAME.jsonl`, the `--log_samples` file of a model."""
    docs = [
        {"job": job, "choices": [f"said that he {end}", f"said that she {end}"], "end": end}
        for job in JOBS
        for end in ENDS
    ]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "pairs.jsonl")
        data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        Path(folder, "made_pairs.yaml").write_text(TASK % data)
        for model, name in zip(models, ("before", "after"), strict=True):
            out = Path(folder, name)
            command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={model}"]
            command += ["--include_path", folder, "--tasks", "made_pairs", "--log_samples", "--output_path", str(out)]
            subprocess.run([*command, "--device", "cpu"], check=True)
            (found,) = out.rglob("samples_*.jsonl")
            (HERE / f"lm-eval-{name}.jsonl").write_text(found.read_text())


def inspect() -> None:
    """`inspect-NAME.json`: 24 questions, two epochs each, the answers drawn from a seed."""
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.log import read_eval_log, write_eval_log
    from inspect_ai.model import ModelOutput
    from inspect_ai.scorer import match
    from inspect_ai.solver import solver

    @solver
    def drawn(seed, share):
        draw = random.Random(seed)

        async def solve(state, generate):
            answer = state.target.text if draw.random() < share else "-1"
            state.output = ModelOutput.from_content("mockllm/model", answer)
            return state

        return solve

    samples = [
        Sample(input=f"{i} + {i}?", target=str(2 * i), id=f"q{i}", metadata={"half": "low" if i < 12 else "high"})
        for i in range(24)
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name, share in (("before", 0.4), ("after", 0.9)):
            task = Task(samples, solver=drawn(name, share), scorer=match(), name="sums")
            how = {"epochs": 2, "log_dir": folder, "max_samples": 1, "display": "none"}
            (log,) = eval(task, model="mockllm/model", **how)
            whole = read_eval_log(log.location)
            for one in whole.samples or ():  # the transcript is most of the file, and no figure is made of it
                one.events = []
            write_eval_log(whole, str(HERE / f"inspect-{name}.json"))


if __name__ == "__main__":
    lm_eval(sys.argv[1:3])
    inspect()
