"""Shipped devices, links and clusters: each figure has a source with a date, and what is not known is left out."""

import re
from pathlib import Path

import pytest

from phalanx.errors import ConfigError
from phalanx.planner.cluster.catalog import (
    device_of,
    known_clusters,
    known_devices,
    known_links,
    link_of,
    open_cluster,
)
from phalanx.planner.cluster.hardware import Citation
from phalanx.planner.cost.estimate import machine_of

DATE = re.compile(r"20\d\d(-\d\d){0,2}")

CLUSTER = """
pools = [{ device = "mine", count = 4 }]
per_node = 4
inside = "pcie-4"
between = { latency_s = 1e-4, bytes_per_s = 1e9 }

[devices.mine]
title = "My device"
memory_gib = 12.0
fp32_tflops = 9.0
"""


def is_dated(source: Citation) -> bool:
    return bool(source.title and source.url.startswith("https://") and DATE.fullmatch(source.date))


@pytest.mark.parametrize("name", sorted(known_devices()))
def test_every_device_has_a_source_for_its_figures_and_for_its_price(name: str) -> None:
    device = known_devices()[name]

    assert device.sources
    assert all(is_dated(source) for source in device.sources)
    if device.price is not None:
        assert is_dated(device.price.source)
        assert 0 < device.price.low <= device.price.high


@pytest.mark.parametrize("name", sorted(known_clusters()))
def test_every_cluster_has_a_source_and_known_devices_and_links(name: str) -> None:
    cluster = known_clusters()[name]

    assert cluster.sources
    assert all(is_dated(source) for source in cluster.sources)
    for pool in cluster.pools:
        assert device_of(cluster, pool.device).title
    assert link_of(cluster, "inside").bytes_per_s >= link_of(cluster, "between").bytes_per_s


def test_the_kinds_of_links_of_the_issue_are_there() -> None:
    assert {"nvlink-3", "infiniband-200", "roce-200", "ethernet-10", "wan", "loopback"} <= set(known_links())


def test_a_device_without_bf16_says_what_it_has() -> None:
    cluster = known_clusters()["v100-nodes"]

    with pytest.raises(ConfigError, match="no peak is known for bf16; take one of fp32, fp16"):
        machine_of(cluster, device_of(cluster, "v100-16gb"), "bf16")


def test_a_cluster_file_brings_its_own_devices(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)

    cluster = open_cluster(str(path))

    assert cluster.num_devices == 4
    assert device_of(cluster, "mine").memory_gib == 12.0
    assert link_of(cluster, "between").bytes_per_s == 1e9
    assert link_of(cluster, "inside") == known_links()["pcie-4"]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('device = "mine"', 'device = "nobody"', "unknown device 'nobody'; choices: a100-40gb"),
        ('"pcie-4"', '"string"', "inside: unknown link 'string'; choices: ethernet-1"),
        ("memory_gib = 12.0", "memory_gib = 0.0", "devices.mine.memory_gib"),
        ("per_node = 4", "per_nod = 4", "per_nod: unknown key; did you mean 'per_node'?"),
        ("count = 4", "count = 0", "pools.0.count"),
    ],
)
def test_a_wrong_cluster_file_is_refused_with_its_key(old: str, new: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER.replace(old, new))

    with pytest.raises(ConfigError) as refused:
        open_cluster(str(path))

    assert reason in str(refused.value)


def test_an_unknown_cluster_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="choices: a100-nodes"):
        open_cluster("moon-base")


def test_this_machine_is_measured_and_has_no_price() -> None:
    from phalanx.planner.cluster.local import this_machine

    cluster = this_machine(2)
    device = device_of(cluster, "core")

    assert cluster.num_devices == 2
    assert device.fp32_tflops is not None
    assert 1e-4 < device.fp32_tflops < 100
    assert device.price is None
    assert device.power_w is None
