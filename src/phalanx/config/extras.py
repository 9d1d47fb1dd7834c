"""Packages of extras that several rooms need: asked for before a run begins, imported when they are used."""

import importlib.util
import logging
import sys
import threading

from phalanx.errors import ConfigError

_BITSANDBYTES = "bitsandbytes"
_IMPORTING = threading.Lock()
"""Held while it is imported: stages of a simulation are threads that make their first update at once."""


def has_bitsandbytes() -> bool:
    """Whether bitsandbytes is installed; it is not imported."""
    return importlib.util.find_spec(_BITSANDBYTES) is not None


def require_bitsandbytes(key: str) -> None:
    """Look for bitsandbytes without importing it."""
    if not has_bitsandbytes():
        raise ConfigError(
            f"{key}: needs {_BITSANDBYTES}, which is not installed; install phalanx-train[quant], or remove it"
        )


def require_tenseal(key: str) -> None:
    """Look for TenSEAL without importing it."""
    if importlib.util.find_spec("tenseal") is None:
        raise ConfigError(f"{key}: needs tenseal, which is not installed; install phalanx-train[he], or remove it")


def import_bitsandbytes() -> None:
    """Import bitsandbytes where it is installed, after which torch has its operators; nothing is fetched.

    While it is imported it would fetch a kernel from the hub, which products here do not use.
    """
    with _IMPORTING:
        if _BITSANDBYTES in sys.modules or not has_bitsandbytes():
            return
        log, fetches = logging.getLogger(f"{_BITSANDBYTES}.backends.cpu.ops"), "kernels"
        before, level = sys.modules.get(fetches), log.level
        sys.modules[fetches] = None  # type: ignore[assignment] # an import of it fails
        log.setLevel(logging.ERROR)
        try:
            importlib.import_module(_BITSANDBYTES)
        finally:
            log.setLevel(level)
            del sys.modules[fetches]
            if before is not None:
                sys.modules[fetches] = before
