"""The unit tier proves that the audit needs no torch: importing it fails here."""

import sys

import pytest

BLOCKED = ("torch", "transformers", "accelerate")


class _Blocker:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} must not be imported by the unit tier", name=name)


def pytest_configure(config: pytest.Config) -> None:
    if any(name in sys.modules for name in BLOCKED):
        raise pytest.UsageError("torch is loaded already: run tests/unit in a process of its own, as `make test` does")
    sys.meta_path.insert(0, _Blocker())
