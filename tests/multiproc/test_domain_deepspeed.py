"""Whole runs of ranks that DeepSpeed joins: they end, begin again and go on elsewhere like any others of a domain."""

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
    pytest.mark.timeout(1200),
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
from phalanx.parallel.deepspeed.extra import build_kernels, environment
with environment("cpu", 0):
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
    """The curve of two ranks that torch joins."""
    place = make_place(tmp_path_factory.mktemp("undisturbed"))
    finish(train_domain(place, *ALONE))
    yield losses(place)
    end_all(place)


def test_a_killed_rank_comes_back_and_goes_on_with_the_losses_of_torchs_ranks(place, undisturbed):
    process = train_domain(place, *HOST)
    wait_for_step(place, process, 7)

    os.kill(rank_pid(process, 1), signal.SIGKILL)
    finish(process)

    check_continued(place, undisturbed, exact=False)
    assert place.summary()["resumed_from"] >= 5


def test_a_checkpoint_goes_on_under_torchs_ranks(place, undisturbed):
    process = train_domain(place, *ALONE, *HOST)
    wait_for_step(place, process, 12)
    os.kill(rank_pid(process, 1), signal.SIGKILL)
    assert end_of(process) == 4, process.text

    finish(train_domain(place, "--from", str(place.path / "run"), "--set", "parallel.zero=1", run_dir="other"))

    lines = read_metrics(place.path / "other" / "metrics.jsonl")
    assert lines[0]["step"] >= 10
    assert [line["loss"] for line in lines] == pytest.approx(undisturbed[lines[0]["step"] :], rel=1e-5)
    assert not [path for path in (place.path / "run").rglob("*") if path.suffix in (".pt", ".pkl", ".bin", ".pth")]


def test_it_needs_nobody_outside(place, undisturbed):
    if not place.can_have("no_network"):
        pytest.skip("this system lets nobody make a network namespace")

    options = ("--run-dir", str(place.path / "run"), *ALONE, *HOST, "--set", "parallel.dp=1")
    finish(place.start("train", str(write_domain(place)), *options, restriction="no_network"))

    check_continued(place, undisturbed, exact=False)
