"""What options of serving commands mean."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from phalanx.errors import ConfigError


def named_directories(option: str, values: Sequence[str] | None) -> dict[str, Path]:
    """Return directories by name, from values such as ``small=models/small``."""
    directories: dict[str, Path] = {}
    for value in values or ():
        name, mark, directory = value.partition("=")
        if not (name and mark and directory):
            raise ConfigError(f"{option} {value}: expected NAME=DIR, such as small=models/small")
        if name in directories:
            raise ConfigError(f"{option} {value}: the name {name} comes twice")
        directories[name] = Path(directory)
    return directories


def config_error(exc: ValidationError) -> ConfigError:
    """Return the mistake of a command line as an error."""
    first = exc.errors(include_url=False)[0]
    place = "".join(f"--{str(part).replace('_', '-')}: " for part in first["loc"])
    return ConfigError(f"{place}{first['msg'].removeprefix('Value error, ')}")


def require_server() -> None:
    """Look for the packages of a server without importing them."""
    missing = [
        name
        for name in ("starlette", "uvicorn", "anyio", "httpx2", "prometheus_client")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise ConfigError(f"serve: needs {', '.join(missing)}; install phalanx-train[serve]")
