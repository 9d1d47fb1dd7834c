"""Whole runs of ranks that DeepSpeed joins: they end, begin again and go on elsewhere like any others of a domain."""

import json
import os
import signal
import subprocess
import sys

import pytest
from domain_lab import (
    ALONE,
    check_continued,
    end_of,
    finish,
    losses,
    rank_pid,
    train_domain,
    wait_for_step,
    write_domain,
)
from real_runs import end_all, make_place

from phalanx.parallel.deepspeed.extra import why_no_extra
from phalanx.telemetry import read_metrics

LACKING = why_no_extra()
pytestmark = [
    pytest.mark.slow,
    # kernels are compiled first, for minutes of a processor
    pytest.mark.timeout(3600),
    pytest.mark.xdist_group("runs with deepspeed"),
    pytest.mark.skipif(LACKING is not None, reason=str(LACKING)),
]
HOST = (
    "--set",
    "deepspeed.zero=3",
    "--set",
    "deepspeed.offload_optimizer=cpu",
    "--set",
    "deepspeed.offload_parameters=cpu",
)


BUILD = """
from phalanx.parallel.deepspeed.extra import build_kernels, deepspeed_environment
with deepspeed_environment("cpu", 0):
    build_kernels(adam=True, files=False)
"""


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory):
    """Compile before anything is timed, and where nothing is yet: a compilation that was killed leaves a lock there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("kernels")))
        subprocess.run([sys.executable, "-c", BUILD], check=True)
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, kernels):
    """The curve of two ranks with DeepSpeed's optimizer kernel, which rounds differently from torch's."""
    place = make_place(tmp_path_factory.mktemp("undisturbed"))
    finish(train_domain(place, *ALONE, *HOST))
    yield losses(place)
    end_all(place)


ADAM = """
import json
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from phalanx.parallel.deepspeed.extra import deepspeed_environment

def moved(make, dtype):
    torch.manual_seed(5)
    weight = torch.nn.Parameter(torch.randn(512, 64, dtype=torch.float32).to(dtype))
    optimizer = make([weight])
    for step in range(12):
        weight.grad = torch.randn(512, 64, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.step()
    return weight.detach().double()

with deepspeed_environment("cpu", 0):
    exact = moved(lambda p: torch.optim.AdamW(p, lr=1e-2), torch.float64)
    theirs = moved(lambda p: DeepSpeedCPUAdam(p, lr=1e-2, adamw_mode=True, weight_decay=1e-2), torch.float32)
    torchs = moved(lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), torch.float32)
print(json.dumps([float((one - exact).norm() / exact.norm()) for one in (theirs, torchs)]))
"""


def test_the_kernel_on_the_host_makes_adams_update_within_rounding():
    found = subprocess.run([sys.executable, "-c", ADAM], check=True, capture_output=True, text=True).stdout

    theirs, torchs = json.loads(found.splitlines()[-1])

    # twelve updates, and single precision rounds at 6e-8
    assert theirs < 12 * 6e-8
    assert torchs < 12 * 6e-8


def test_a_killed_rank_comes_back_and_goes_on_with_the_same_losses(place, undisturbed):
    """To the bit: the kernel keeps powers of its betas as running products, and a resumed one makes them alike."""
    process = train_domain(place, *HOST)
    wait_for_step(place, process, 7)

    os.kill(rank_pid(process, 1), signal.SIGKILL)
    finish(process)

    check_continued(place, undisturbed)
    assert place.summary()["resumed_from"] >= 5


def test_a_checkpoint_goes_on_under_torchs_ranks_of_any_layout(place, undisturbed):
    process = train_domain(place, *ALONE, *HOST)
    wait_for_step(place, process, 12)
    os.kill(rank_pid(process, 1), signal.SIGKILL)
    assert end_of(process) == 4, process.text

    source = str(place.path / "run")
    layouts = {"shared": ("--set", "parallel.zero=1"), "whole": ("--set", "parallel.zero=0")}
    for name, layout in layouts.items():
        finish(train_domain(place, "--from", source, *layout, run_dir=name))

    shared, whole = (read_metrics(place.path / name / "metrics.jsonl") for name in layouts)
    assert shared[0]["step"] >= 10
    # of this loss DeepSpeed has made every update; the later ones are made by torch's kernel
    assert shared[0]["loss"] == pytest.approx(undisturbed[shared[0]["step"]], rel=1e-6)
    assert [line["loss"] for line in shared] == pytest.approx([line["loss"] for line in whole], rel=1e-6)
    assert not [path for path in (place.path / "run").rglob("*") if path.suffix in (".pt", ".pkl", ".bin", ".pth")]


def test_it_needs_nobody_outside(place):
    """One rank: what another order of additions changes, Adam's division by small moments magnifies to 2e-5."""
    if not place.can_have("no_network"):
        pytest.skip("this system lets nobody make a network namespace")
    options = (*ALONE, *HOST, "--set", "parallel.dp=1")
    finish(train_domain(place, *options, run_dir="outside"))

    inside = ("--run-dir", str(place.path / "run"), *options)
    finish(place.start("train", str(write_domain(place)), *inside, restriction="no_network"))

    check_continued(place, losses(place, "outside"))
