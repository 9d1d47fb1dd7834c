"""Memory of ranks: measured beside planned."""

import pytest

from phalanx.lab.bench import BENCHES
from phalanx.lab.bench.parallel.memory import large_run, measure_memory, with_adapters
from phalanx.parallel import ParallelConfig


@pytest.mark.slow
def test_each_row_has_what_was_planned_by_part_and_what_was_there(tiny):
    (row,) = measure_memory([(tiny, ParallelConfig(dp=2))], quick=True)["rows"]

    assert (row["layout"], row["ranks"]) == ("dp=2", 2)
    assert row["peak_memory_bytes"] > 0
    assert row["memory_ratio"] == row["planned_memory_bytes"] / row["peak_memory_bytes"]
    parts = ("parameters", "gradients", "optimizer", "activations", "buffers", "outer")
    assert row["planned_memory_bytes"] == sum(row[f"planned_{name}"] for name in parts)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_takes_what_was_planned_within_a_tenth(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))
    given = [{}, *({"dp": 2, "zero": zero} for zero in range(4)), {"dp": 2, "zero": 3, "offload": True}]

    rows = measure_memory([(large_run(), ParallelConfig.model_validate(keys)) for keys in given], quick=True)["rows"]

    ratios = {row["layout"]: row["memory_ratio"] for row in rows}
    assert all(0.9 <= ratio <= 1.1 for ratio in ratios.values()), ratios


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_with_adapters_or_in_a_group_takes_what_was_planned_within_a_tenth(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))
    full, thin = large_run(), with_adapters(large_run())
    given = [(thin, {}), (thin, {"dp": 2, "zero": 3}), (thin, {"tp": 2}), (full, {"dp": 4, "zero": 3, "replicas": 2})]

    rows = measure_memory([(run, ParallelConfig.model_validate(keys)) for run, keys in given], quick=True)["rows"]

    ratios = {row["layout"]: row["memory_ratio"] for row in rows}
    assert all(0.9 <= ratio <= 1.1 for ratio in ratios.values()), ratios


def test_it_is_on_the_command_line():
    assert "memory" in BENCHES
