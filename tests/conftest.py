"""Tiers: the folder a test lies in is its marker."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        tier = Path(item.path).relative_to(Path(__file__).parent).parts[0]
        if tier in {"unit", "models", "real"}:
            item.add_marker(tier)
