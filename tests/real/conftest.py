"""Fixtures of the real tier: published data and pretrained weights, or a skip that says what is missing."""

import os
from pathlib import Path

import pytest


def _from_environment(variable: str, name: str) -> Path:
    root = os.environ.get(variable)
    if not root:
        pytest.skip(f"${variable} is not set")
    path = Path(root, name)
    if not path.exists():
        pytest.skip(f"{name} is not under ${variable}")
    return path


@pytest.fixture(scope="session")
def real_data():
    """`real_data("stereoset/dev.json")` is that file under $FAIRHEAD_DATA."""
    return lambda name: _from_environment("FAIRHEAD_DATA", name)


@pytest.fixture(scope="session")
def real_model():
    """`real_model("minilm-l6")` is that folder under $FAIRHEAD_MODELS."""
    return lambda name: _from_environment("FAIRHEAD_MODELS", name)
