"""The command line of `phalanx launch`: what it prints, what it refuses, and what it is inside torchrun."""

import sys
from pathlib import Path

import pytest

from phalanx.cli import run_command

RUN_FILE = Path(__file__).resolve().parents[2] / "examples" / "slurm" / "run.toml"
EVERYBODY = ("owner", "alice", "bob", "alice-2", "bob-2")


@pytest.fixture
def words(tmp_path):
    """A command line on a machine with the keys of all parties."""
    for name in EVERYBODY:
        (tmp_path / name).mkdir()
        (tmp_path / name / "signing.key").touch()
    return ("launch", str(RUN_FILE), "--set", f"pipeline.pki='{tmp_path}'", "--run-dir", str(tmp_path / "run"))


def test_a_dry_run_prints_what_would_be_run_and_starts_nothing(words, tmp_path, capsys):
    assert run_command([*words, "--dry-run", "--max-restarts", "7"]) == 0

    said = capsys.readouterr().out
    assert "-m torch.distributed.run --nnodes 1 --nproc-per-node 3 --max-restarts 7" in said
    assert f"-m phalanx launch {RUN_FILE}" in said
    assert not (tmp_path / "run").exists()


def test_a_dry_run_for_ray_needs_no_ray(words, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)

    assert run_command([*words, "--engine", "ray", "--dry-run"]) == 0

    assert "placement group SPREAD" in capsys.readouterr().out


def test_without_ray_the_extra_is_named(words, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)

    assert run_command([*words, "--engine", "ray"]) == 2

    assert "phalanx-train[ray]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--engine", "slurm"), "slurm"),
        (("--max-restarts", "-1"), "max-restarts"),
        (("--nnodes", "2"), "--rdzv-endpoint"),
        (("--party", "mallory"), "mallory"),
        (("--set", "pipeline.stages=no"), "pipeline.stages"),
    ],
)
def test_what_is_wrong_is_named_before_anything_starts(words, options, said, capsys):
    assert run_command([*words, *options]) == 2

    assert said in capsys.readouterr().err


def test_torchrun_must_start_as_many_processes_as_there_are_parties(words, capsys, monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)

    assert run_command(list(words)) == 2

    assert "3 parties run here (owner, alice, bob); set --nproc-per-node to 3" in capsys.readouterr().err
