"""A device that is not there is refused by its key, before anything is begun."""

import importlib.metadata
import subprocess
import sys

import pytest
import torch

from phalanx.engine import check_build, check_device
from phalanx.errors import ConfigError
from phalanx.parallel.groups.rank_env import RankEnv
from phalanx.parallel.groups.rendezvous import own_device
from phalanx.train import describe_run, load_run, train
from tiny_run_file import tiny_run_file


@pytest.fixture
def machine(monkeypatch):
    """This machine with so many GPUs, under a build of torch."""

    def has(devices, version="2.13.0+cu130"):
        monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)

    return has


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1"])
def test_a_device_that_is_there_is_taken(machine, device):
    machine(2)

    check_device(device, "train.device")
    check_build(device, "train.device")


def test_a_machine_without_a_gpu_has_the_cpu(machine):
    machine(0, "2.13.0+cpu")

    check_device("cpu", "train.device")


@pytest.mark.parametrize(
    ("devices", "version", "device", "said"),
    [
        (0, "2.13.0+cpu", "cuda", 'torch 2.13.0+cpu is built for CPUs alone; set train.device = "cpu", or install'),
        (0, "2.13.0", "cuda:0", 'finds no CUDA device here; set train.device = "cpu", or run where there is one'),
        (1, "2.13.0", "cuda:1", "torch finds 1 here, cuda:0; set"),
        (1, "2.13.0", "gpu", 'is no device of Phalanx; set train.device = "cpu", or "cuda", "cuda:1" ...'),
        (1, "2.13.0", "cuda:x", "is no device of Phalanx; set"),
        (4, "2.13.0", "cuda:4", "torch finds 4 here, cuda:0 to cuda:3; set"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_what_was_found(machine, devices, version, device, said):
    machine(devices, version)

    with pytest.raises(ConfigError) as refusal:
        check_device(device, "train.device")

    assert str(refusal.value).startswith(f'train.device = "{device}": ')
    assert said in str(refusal.value)


def test_a_rank_beyond_the_devices_of_its_machine_is_refused(machine):
    machine(1)
    place = RankEnv(rank=1, world=2, local_rank=1, local_world=2)

    with pytest.raises(ConfigError, match="torch finds 1 here"):
        own_device("cuda", place)


def test_a_run_without_its_device_leaves_no_directory_behind(machine, tmp_path):
    machine(0)
    (tmp_path / "run.toml").write_text(tiny_run_file("[pipeline]\nstages = 2\n"))
    run = load_run(tmp_path / "run.toml", ["train.device=cuda"])

    for begin in (train, describe_run):
        with pytest.raises(ConfigError, match=r"train\.device"):
            begin(run, tmp_path / "run")

    assert not (tmp_path / "run").exists()


def test_the_build_is_looked_at_without_torch():
    code = """
import sys
from phalanx.engine import check_build
check_build("cpu", "train.device")
assert "torch" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
