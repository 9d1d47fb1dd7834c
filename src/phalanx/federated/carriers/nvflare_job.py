"""The directory of an NVFlare job that forwards frames of a run; NVFlare itself is not needed to write it."""

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from phalanx.errors import ConfigError

_PACKAGE = "phalanx_carrier"
_COPIED = ("shim.py", "nvflare_shim.py")


def write_job(directory: Path, name: str, sites: Sequence[str], owner_socket: Path, site_socket: str) -> None:
    """Write a job, for `nvflare job submit`.

    Args:
        directory: New.
        name: Of the job.
        sites: Names of the run's sites, which NVFlare's clients must have too.
        owner_socket: Path on the machine of NVFlare's server, which is the owner's.
        site_socket: Path on each client's machine; ``{site}`` stands for its name.

    Raises:
        ConfigError: The directory is there already, or cannot be written.
    """
    custom, config = directory / "app" / "custom" / _PACKAGE, directory / "app" / "config"
    module, version = f"{_PACKAGE}.nvflare_shim", 2
    server = {"id": "frames", "path": f"{module}.FrameController", "args": {"owner_socket": str(owner_socket)}}
    executor = {"path": f"{module}.FrameExecutor", "args": {"site_socket": site_socket}}
    written = {
        directory / "meta.json": {
            "name": name,
            "resource_spec": {},
            "min_clients": 1,
            "deploy_map": {"app": ["server", *sites]},
        },
        config / "config_fed_server.json": {"format_version": version, "workflows": [server], "components": []},
        config / "config_fed_client.json": {
            "format_version": version,
            "executors": [{"tasks": ["phalanx_frame"], "executor": executor}],
            "components": [],
        },
    }
    try:
        directory.mkdir(parents=True)
        custom.mkdir(parents=True)
        config.mkdir()
        for path, content in written.items():
            path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (custom / "__init__.py").write_text("", encoding="utf-8")
        for one in _COPIED:
            code = files("phalanx.federated.carriers").joinpath(one).read_text(encoding="utf-8")
            (custom / one).write_text(code, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{directory}: cannot be written ({exc.strerror}); choose a new directory").about(
            file=str(directory), do="choose a new directory"
        ) from exc
