"""The devices, links, clusters and model shapes that are shipped, and those from files."""

import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from phalanx.config import load_config
from phalanx.errors import ConfigError
from phalanx.planner.cluster.hardware import Cluster, Device
from phalanx.planner.cluster.links import Link
from phalanx.planner.guard.finding import sealed_bandwidth
from phalanx.planner.model.read import read_shape, shape_of
from phalanx.planner.model.shape import ModelShape


@cache
def known_devices() -> dict[str, Device]:
    """Return the shipped devices by name."""
    return {name: Device.model_validate(_as_tuples(value)) for name, value in _load_data("devices.toml").items()}


@cache
def known_links() -> dict[str, Link]:
    """Return the shipped links by name."""
    keys = ("latency_s", "bytes_per_s", "scatter_work")
    return {
        name: Link(**{key: float(value[key]) for key in keys if key in value})
        for name, value in _load_data("links.toml").items()
    }


@cache
def known_clusters() -> dict[str, Cluster]:
    """Return the shipped clusters by name."""
    return {name: Cluster.model_validate(_as_tuples(value)) for name, value in _load_data("clusters.toml").items()}


def known_configs() -> dict[str, dict[str, Any]]:
    """Return the keys of the shipped models' config.json by name."""
    return _load_data("models.toml")


@cache
def known_models() -> dict[str, ModelShape]:
    """Return the shipped model shapes by name."""
    return {name: shape_of(value, name) for name, value in known_configs().items()}


def open_model_shape(name: str) -> ModelShape:
    """Return a model's shape.

    Args:
        name: Name of a shipped model, or path of a config.json or of its directory.
    """
    if name in known_models():
        return known_models()[name]
    if not Path(name).exists():
        choices = ", ".join(sorted(known_models()))
        raise ConfigError(f"--model {name}: is no file and no known model; choices: {choices}").with_facts(
            code="PHX-C002", key="--model", found=name
        )
    return read_shape(Path(name))


def open_cluster(name: str) -> Cluster:
    """Return a cluster."""
    if name in known_clusters():
        return known_clusters()[name]
    path = Path(name)
    if not path.exists() and path.suffix != ".toml":
        choices = ", ".join(sorted(known_clusters()))
        raise ConfigError(f"--cluster {name}: is no file and no known cluster; choices: {choices}").with_facts(
            code="PHX-C002", key="--cluster", found=name, expected=choices, do="give one of the choices, or a file"
        )
    cluster = load_config(path, Cluster)
    for pool in cluster.pools:
        device_of(cluster, pool.device, str(path))
    for side in link_sides(cluster):
        link_of(cluster, side, str(path))
    return cluster


def device_of(cluster: Cluster, name: str, where: str = "cluster") -> Device:
    """Return one of a cluster's devices, its own before the shipped ones."""
    devices = {**known_devices(), **cluster.devices}
    if name not in devices:
        raise ConfigError(f"{where}: pools: unknown device {name!r}; choices: {', '.join(sorted(devices))}")
    return devices[name]


def link_sides(cluster: Cluster) -> tuple[str, ...]:
    """Return where a cluster has links."""
    return ("inside", "between") if cluster.islands is None else ("inside", "between", "islands")


def link_of(cluster: Cluster, side: str, where: str = "cluster") -> Link:
    """Return the link ``inside`` nodes, ``between`` them, or between ``islands`` where a cluster says so."""
    link: str | Link = getattr(cluster, side)
    if isinstance(link, str):
        if link not in known_links():
            raise ConfigError(f"{where}: {side}: unknown link {link!r}; choices: {', '.join(sorted(known_links()))}")
        link = known_links()[link]
    if cluster.sealed and side != "inside":
        return link.model_copy(update={"bytes_per_s": sealed_bandwidth(link.bytes_per_s)})
    return link


def _load_data(name: str) -> dict[str, Any]:
    text = resources.files("phalanx.planner").joinpath("data", name).read_text(encoding="utf-8")
    return tomllib.loads(text)


def _as_tuples(value: Any) -> Any:
    """TOML's arrays as the tuples that strict models want."""
    if isinstance(value, dict):
        return {key: _as_tuples(inner) for key, inner in value.items()}
    return tuple(_as_tuples(inner) for inner in value) if isinstance(value, list) else value
