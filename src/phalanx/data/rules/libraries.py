"""Libraries that rules import where they are used: an absent one is named with the extra that has it."""

import importlib
from types import ModuleType

from phalanx.errors import DataError


def library(module: str, rule: str) -> ModuleType:
    """Import a library of the extra `data`.

    Raises:
        DataError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise DataError(f"rule {rule!r} needs {module.partition('.')[0]}; install phalanx-train[data]") from exc
