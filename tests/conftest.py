"""Tiers: the folder a test lies in is its marker."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# No wall time in a test: a busy machine is no failure. The same examples each time: new ones are looked for by fuzzing,
# in the slow tier, and where there is no derandomize.
settings.register_profile("patient", deadline=None, derandomize=True)
settings.load_profile("patient")

# Some virtual machines announce AMX and have none: there a product in bfloat16 ends the process. oneDNN reads this when
# it is first used, also in processes that tests start.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="write the figures of tests/golden anew")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    for item in items:
        # Doctests lie under src/, outside every tier.
        tier = item.path.relative_to(tests).parts[0] if item.path.is_relative_to(tests) else ""
        if tier in {"unit", "models", "golden", "real"}:
            item.add_marker(tier)
