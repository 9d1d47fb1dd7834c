"""Modules that are imported when a test first uses them: each test worker collects every file, and runs a part."""

import importlib
import importlib.util
from typing import Any

import pytest


class LateModule:
    """A module that the first use of a name in it imports."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        # pytest asks everything in a module whether it is a fixture or a test
        if attribute.startswith(("_", "pytest")):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def need_module(name: str, reason: str) -> LateModule:
    """Skip the tests of a file where a module is not installed; it is imported later."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(reason, allow_module_level=True)
    return LateModule(name)
