"""Names of a package that are imported when they are first asked for: to read a run file must not load torch."""

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any


def late_names(package: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package (PEP 562): it finds names that are imported for type checkers alone.

    The block ``if TYPE_CHECKING:`` is the one list of these names. Define ``__getattr__`` where type checkers do not
    look: they would take every name for known.

    Raises:
        ImportError: (from what is returned) A name is that of its own module, which would be found in its place.
    """

    @cache
    def home_of() -> dict[str, str]:
        homes = dict(_imported_for_checkers(inspect.getsource(sys.modules[package])))
        if hidden := sorted(name for name, home in homes.items() if home == f"{package}.{name}"):
            raise ImportError(f"{package}: {', '.join(hidden)}: the module of that name hides it; rename the module")
        return homes

    def find(name: str) -> Any:
        if name.startswith("__") or name not in home_of():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home_of()[name]), name)

    return find


def _imported_for_checkers(source: str) -> Iterator[tuple[str, str]]:
    """Yield each name, and the module that has it."""
    for block in ast.parse(source).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for node in block.body:
                if isinstance(node, ast.ImportFrom) and node.module is not None:
                    yield from ((alias.name, node.module) for alias in node.names)
