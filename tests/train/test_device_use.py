"""What a step makes of its devices is measured while it trains, and shown where nobody audits."""

import io
import itertools
import re

import pytest
from rich.console import Console

from phalanx.telemetry import read_metrics
from phalanx.telemetry.progress import StepReading
from phalanx.train import train
from phalanx.train.records import device_use
from phalanx.train.records.device_use import DeviceUse, peak_of


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("NVIDIA GeForce GTX 1080", "bf16", None),
        ("AMD Instinct MI300X", "bf16", None),
    ],
)
def test_the_peak_of_a_gpu_is_that_of_the_planners_table(name, precision, tflops):
    peak = peak_of(name, precision)

    assert peak is None if tflops is None else peak == pytest.approx(tflops * 1e12, rel=0.01)


def test_a_step_waits_from_its_beginning_to_its_batch_and_again_after_a_batch_that_failed(make_run, monkeypatch):
    clock = itertools.accumulate([10.0, 2.0, 5.0, 3.0])
    monkeypatch.setattr(device_use.time, "perf_counter", lambda: next(clock))
    use = DeviceUse(make_run())

    use.start_step()
    use.end_batch_wait()
    use.restart_batch_wait()
    use.end_batch_wait()

    row = use.usage_figures(100.0)
    assert row["data_wait_s"] == 5.0
    assert row["peak_memory_bytes"] > 1e7
    # of cores no peak is known
    assert "mfu" not in row


def test_where_nobody_audits_the_step_shows_its_devices_instead():
    unaudited = StepReading(2.5, 1000.0, data_share=0.031, memory_bytes=3 * 1024**3, mfu=0.412)

    assert str(unaudited) == "loss 2.5000  1,000 tokens/s  data 3 %  3.0 GiB  MFU 41 %"
    assert str(StepReading(2.5, 1000.0)) == "loss 2.5000  1,000 tokens/s  audits 0  alarms 0"


def test_a_run_of_ranks_shows_and_records_them(make_run, tmp_path):
    console = Console(file=io.StringIO(), width=200)

    train(make_run("pipeline-", "parallel.dp=1", "train.steps=2"), tmp_path / "run", console=console)

    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(0 <= line["data_wait_s"] < line["wall_s"] and line["peak_memory_bytes"] > 1e7 for line in lines)
    shown = re.findall(r"^step 2/2 .*$", console.file.getvalue(), re.MULTILINE)
    assert shown and "data " in shown[0] and "iB" in shown[0] and "audits" not in shown[0]
