import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.cli import run
from phalanx.config import dump_toml
from phalanx.errors import ConfigError
from phalanx.lab.attacks import drill, run_worker_with_attack
from phalanx.pipeline import AttackConfig, WorkerConfig, unwrapped
from phalanx.testing import WorkerCrash

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart.toml"


@pytest.fixture
def started(monkeypatch):
    """Note how the worker would be run, without a network."""
    calls = []
    monkeypatch.setattr(drill, "run_worker", lambda *arguments, **named: calls.append((*arguments, named)))
    return calls


def worker(tmp_path, **changes):
    return WorkerConfig(identity=str(tmp_path / "worker-1"), owner="127.0.0.1:1", **changes)


def test_a_worker_with_an_attack_lies_under_its_own_name_with_its_copies_and_its_endpoint(tmp_path, started):
    config = worker(tmp_path, attack=AttackConfig(kind="equivocation"), attack_log=str(tmp_path / "attack.jsonl"))

    run_worker_with_attack(config)

    ((found, _, open_endpoint, _),) = started
    attack = open_endpoint.keywords["rewrite"].__self__
    assert found is config
    assert (attack.party, attack.config.kind) == ("worker-1", "equivocation")


def test_an_attacker_stands_before_whatever_computes_for_it_and_shows_honest_kernels(tmp_path, monkeypatch, started):
    liar = SimpleNamespace(wrap_copy=lambda copy, held: ("liar", copy, held), rewrite=None, hear=None)
    monkeypatch.setattr(drill, "actor", lambda *_: liar)

    run_worker_with_attack(worker(tmp_path, attack=AttackConfig()), lambda copy, held: ("group", copy, held))

    ((_, kernels, _, named),) = started
    assert kernels("copy", True) == ("group", "copy", True)
    assert named["wrap_copy"](kernels("copy", True), True) == ("liar", ("group", "copy", True), True)


def test_an_unknown_attack_ends_the_worker_before_it_joins(tmp_path, started):
    with pytest.raises(ConfigError, match=r"attack\.kind"):
        run_worker_with_attack(worker(tmp_path, attack=AttackConfig(kind="evil")))

    assert started == []


def test_a_worker_that_crashes_on_purpose_dies_as_if_it_had_been_killed(tmp_path, monkeypatch):
    signals = []

    def crash(*_, **named):
        raise WorkerCrash("worker-1")

    monkeypatch.setattr(drill, "run_worker", crash)
    monkeypatch.setattr(drill.os, "kill", lambda pid, which: signals.append(which))

    run_worker_with_attack(worker(tmp_path, attack=AttackConfig(kind="stall")))

    assert signals == [signal.SIGKILL]


@pytest.mark.parametrize("attack", [None, AttackConfig()])
def test_an_honest_worker_never_loads_the_red_team(tmp_path, monkeypatch, attack):
    calls = []
    monkeypatch.setattr("phalanx.pipeline.die_with_parent", lambda: None)
    monkeypatch.setattr("phalanx.pipeline.run_worker", lambda *arguments: calls.append(arguments))
    monkeypatch.setitem(sys.modules, "phalanx.lab.attacks", None)
    path = tmp_path / "worker.toml"
    path.write_text(dump_toml(worker(tmp_path, attack=attack)))

    assert run(["worker", str(path)]) == 0
    ((config, wrap_copy),) = calls
    assert config.owner == "127.0.0.1:1"
    assert wrap_copy is unwrapped


def test_a_worker_file_that_is_wrong_is_refused(tmp_path, capsys):
    path = tmp_path / "worker.toml"
    path.write_text('identity = "x"\n')

    assert run(["worker", str(path)]) == 2
    assert "owner" in capsys.readouterr().err


@pytest.mark.parametrize("option", [[], ["--dry-run"]])
def test_a_run_file_with_an_unknown_attack_is_refused_before_anything_starts(tmp_path, capsys, option):
    arguments = ["train", str(QUICKSTART), "--set", "attack.kind='evil'", "--run-dir", str(tmp_path / "run")]

    assert run([*arguments, *option]) == 2

    assert "attack.kind: found 'evil'; choices: none, adaptive" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()
