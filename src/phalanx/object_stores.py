"""Object stores behind one interface: fsspec finds the client by the address, and errors of clients become ours."""

import sys
from typing import Any


def open_store(address: str) -> tuple[Any, str]:
    """Return fsspec's file system for an address, and the path in it.

    Credentials and endpoints come from where the store's own client looks for them (environment, profiles), never
    from a config.
    """
    import fsspec  # noqa: PLC0415 - an extra

    files, root = fsspec.core.url_to_fs(address)
    return files, str(root)


def client_errors() -> tuple[type[Exception], ...]:
    """What stores raise: the system's errors, and their clients' own where those are installed."""
    classes: list[type[Exception]] = [OSError, ValueError]
    for module, name in (("botocore.exceptions", "BotoCoreError"), ("botocore.exceptions", "ClientError")):
        classes.append(_error_class(module, name) or OSError)
    classes.append(_error_class("aiohttp", "ClientError") or OSError)
    return tuple(dict.fromkeys(classes))


def reason_of(exc: Exception) -> str:
    """The system's word for a failure, or its type: a client's own text may repeat a request with its credentials."""
    return getattr(exc, "strerror", None) or type(exc).__name__


def _error_class(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)
