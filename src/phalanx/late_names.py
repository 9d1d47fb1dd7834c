"""Names of a package that are imported when they are first asked for: to read a run file must not load torch."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def late_names(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package (PEP 562).

    Define it where type checkers do not look: they would take every name for known, and the imports that the package
    shows them are what they check.

    Args:
        package: Its name.
        homes: The names by the module below it that has them.

    Raises:
        AttributeError: (from what is returned) The package has no such name.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)

    return find
