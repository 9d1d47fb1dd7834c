"""Directories that an engine needs to forward frames of a run; the engine itself is not needed to write them."""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from phalanx.errors import ConfigError

_PACKAGE = "phalanx_carrier"
_APP = """[project]
name = "phalanx-carrier"
version = "1.0.0"
description = "Forwards frames between the owner of a run and its sites"
dependencies = []

[tool.flwr.app]
publisher = "phalanx"

[tool.flwr.app.components]
serverapp = "{package}.flower_shim:server_app"
clientapp = "{package}.flower_shim:client_app"

[tool.flwr.app.config]
owner-socket = {owner_socket}
site-socket = {site_socket}
"""


def write_nvflare_job(directory: Path, name: str, sites: Sequence[str], owner_socket: Path, site_socket: str) -> None:
    """Write a job, for `nvflare job submit`.

    Args:
        site_socket: Path on each client's machine; ``{site}`` stands for its name.
    """
    module, version = f"{_PACKAGE}.nvflare_shim", 2
    server = {"id": "frames", "path": f"{module}.FrameController", "args": {"owner_socket": str(owner_socket)}}
    executor = {"path": f"{module}.FrameExecutor", "args": {"site_socket": site_socket}}
    meta = {"name": name, "resource_spec": {}, "min_clients": 1, "deploy_map": {"app": ["server", *sites]}}
    client = {
        "format_version": version,
        "executors": [{"tasks": ["phalanx_frame"], "executor": executor}],
        "components": [],
    }
    _write_files(
        directory,
        {
            "meta.json": _write_json(meta),
            "app/config/config_fed_server.json": _write_json(
                {"format_version": version, "workflows": [server], "components": []}
            ),
            "app/config/config_fed_client.json": _write_json(client),
            **_package_files("app/custom", "nvflare_shim.py"),
        },
    )


def write_flower_app(directory: Path, owner_socket: Path, site_socket: str) -> None:
    """Write an app, for `flwr run`.

    Args:
        site_socket: Path on each SuperNode's machine; ``{site}`` stands for the site that it says it is of.
    """
    # a string of JSON is one of TOML too
    owner, site = (json.dumps(path, ensure_ascii=False) for path in (str(owner_socket), site_socket))
    app = _APP.format(package=_PACKAGE, owner_socket=owner, site_socket=site)
    _write_files(directory, {"pyproject.toml": app, **_package_files(".", "flower_shim.py")})


def _write_json(content: object) -> str:
    return json.dumps(content, indent=2) + "\n"


def _package_files(folder: str, engine: str) -> dict[str, str]:
    ours = files("phalanx.federated.carriers")
    code = {f"{folder}/{_PACKAGE}/{file}": ours.joinpath(file).read_text("utf-8") for file in ("shim.py", engine)}
    return {f"{folder}/{_PACKAGE}/__init__.py": "", **code}


def _write_files(directory: Path, written: Mapping[str, str]) -> None:
    try:
        directory.mkdir(parents=True)
        for path, content in written.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text(content, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{directory}: cannot be written ({exc.strerror}); choose a new directory").with_facts(
            file=str(directory), do="choose a new directory"
        ) from exc
