"""The production worker cannot be told to attack; the laboratory starts a worker of its own that can."""

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx import child
from phalanx.cli import run_command
from phalanx.config import dump_toml, load_config
from phalanx.errors import ConfigError
from phalanx.lab.attacks import AttackPlan, attackers_of
from phalanx.lab.attacks import worker as laboratory
from phalanx.pipeline import AttackConfig, LocalWorkers, PartyLayout, WorkerConfig
from phalanx.security.crypto import create_authority, issue_certificate
from phalanx.testing import WorkerCrash
from phalanx.train import load_run, train

QUICKSTART = Path(__file__).resolve().parents[3] / "examples" / "quickstart.toml"


@pytest.fixture
def started(monkeypatch):
    """Note how the worker would be run, without a network."""
    calls = []
    monkeypatch.setattr(laboratory, "run_worker", lambda *arguments, **named: calls.append((*arguments, named)))
    return calls


@pytest.fixture
def spawned(monkeypatch):
    """Note which processes would be started."""
    calls, popen = [], subprocess.Popen

    def spawn(command, **_):
        calls.append(command)
        return popen([sys.executable, "-S", "-c", ""])

    monkeypatch.setattr(child.subprocess, "Popen", spawn)
    yield calls


def worker(tmp_path, **changes):
    return WorkerConfig(identity=str(tmp_path / "worker-1"), owner="127.0.0.1:1", **changes)


def plan(kind, **changes):
    return AttackPlan(attackers={"worker-1": AttackConfig(kind=kind)}, **changes)


def test_a_worker_with_an_attack_lies_under_its_own_name_with_its_copies_and_its_endpoint(tmp_path, started):
    config = worker(tmp_path)

    laboratory.run_attacker(plan("equivocation", log=str(tmp_path / "attack.jsonl")), config)

    ((found, _, open_endpoint, _),) = started
    attack = open_endpoint.keywords["actor"].rewrite.__self__
    assert found is config
    assert (attack.party, attack.config.kind) == ("worker-1", "equivocation")


def test_an_attacker_stands_before_whatever_computes_for_it_and_shows_honest_kernels(tmp_path, monkeypatch, started):
    liar = SimpleNamespace(wrap_copy=lambda copy, held: ("liar", copy, held), rewrite=None, hear=None)
    monkeypatch.setattr(laboratory, "make_actor", lambda *_: liar)

    laboratory.run_attacker(plan("drift"), worker(tmp_path), lambda copy, held: ("group", copy, held))

    ((_, kernels, _, named),) = started
    assert kernels("copy", True) == ("group", "copy", True)
    assert named["wrap_copy"](kernels("copy", True), True) == ("liar", ("group", "copy", True), True)


@pytest.mark.parametrize("kind", ["evil", "none"])
def test_an_unknown_attack_ends_the_worker_before_it_joins(tmp_path, started, kind):
    with pytest.raises(ConfigError, match=r"attack\.kind"):
        laboratory.run_attacker(plan(kind), worker(tmp_path))

    assert started == []


def test_a_party_that_the_plan_does_not_name_is_not_started_as_if_it_were_honest(tmp_path, started):
    with pytest.raises(ConfigError, match=r"found \['worker-1'\], not worker-2; start it with `phalanx worker`"):
        laboratory.run_attacker(plan("drift"), WorkerConfig(identity="pki/worker-2", owner="127.0.0.1:1"))

    assert started == []


def test_a_worker_that_crashes_on_purpose_dies_as_if_it_had_been_killed(tmp_path, monkeypatch):
    signals = []

    def crash(*_, **named):
        raise WorkerCrash("worker-1")

    monkeypatch.setattr(laboratory, "run_worker", crash)
    monkeypatch.setattr(laboratory.os, "kill", lambda pid, which: signals.append(which))

    laboratory.run_attacker(plan("stall"), worker(tmp_path))

    assert signals == [signal.SIGKILL]


@pytest.mark.parametrize("arguments", [[], ["attack.toml"], ["attack.toml", "missing.toml"]])
def test_the_laboratorys_worker_refuses_a_wrong_command_line_or_file(monkeypatch, capsys, tmp_path, started, arguments):
    monkeypatch.setattr(laboratory, "die_with_parent", lambda: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "attack.toml").write_text(dump_toml(plan("drift")))

    assert laboratory.main(arguments) == 2

    assert started == []
    assert "usage" in (said := capsys.readouterr().err) or "missing.toml: cannot be read" in said


def test_the_laboratorys_worker_reads_both_files_and_attacks(monkeypatch, tmp_path, started):
    monkeypatch.setattr(laboratory, "die_with_parent", lambda: None)
    (tmp_path / "attack.toml").write_text(dump_toml(plan("drift")))
    (tmp_path / "worker.toml").write_text(dump_toml(worker(tmp_path)))

    assert laboratory.main([str(tmp_path / "attack.toml"), str(tmp_path / "worker.toml")]) == 0

    ((config, *_),) = started
    kept = worker(tmp_path).model_copy(update={"journal": str(Path(worker(tmp_path).identity) / "state")})
    assert config == kept


@pytest.mark.parametrize(
    ("kind", "rank", "said"),
    [
        ("drift", 2, "ranks.worker-1: found 2; worker-1 has 2 ranks"),
        ("drift", -1, "ranks.worker-1: found -1"),
        ("wrong_learning_rate", 1, "'wrong_learning_rate' is on what rank 0 of a party has"),
    ],
)
def test_a_rank_that_cannot_lie_so_is_refused_before_any_rank_starts(
    monkeypatch, capsys, tmp_path, started, kind, rank, said
):
    monkeypatch.setattr(laboratory, "die_with_parent", lambda: None)
    monkeypatch.setattr(laboratory, "open_group", lambda *_: started.append("group"))
    (tmp_path / "attack.toml").write_text(dump_toml(plan(kind, ranks={"worker-1": rank})))
    (tmp_path / "worker.toml").write_text(dump_toml(worker(tmp_path, parallel=PartyLayout(dp=2))))

    assert laboratory.main([str(tmp_path / "attack.toml"), str(tmp_path / "worker.toml")]) == 2

    assert said in capsys.readouterr().err
    assert started == []


def test_an_honest_worker_never_loads_the_red_team(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("phalanx.cli.worker.die_with_parent", lambda: None)
    monkeypatch.setattr("phalanx.pipeline.run_worker", lambda config, worker_console: calls.append(config))
    monkeypatch.setitem(sys.modules, "phalanx.lab", None)
    monkeypatch.setitem(sys.modules, "phalanx.lab.attacks", None)
    create_authority(tmp_path)
    issue_certificate(tmp_path, "worker-1")
    path = tmp_path / "worker.toml"
    path.write_text(dump_toml(worker(tmp_path)))

    assert run_command(["worker", str(path)]) == 0
    (config,) = calls
    assert config.owner == "127.0.0.1:1"


@pytest.mark.parametrize("line", ["[attack]\nkind = 'drift'\n", "[attack]\nkind = 'none'\n", "attack_log = 'x'\n"])
def test_a_production_worker_cannot_be_told_to_attack(tmp_path, monkeypatch, capsys, line):
    calls = []
    monkeypatch.setattr("phalanx.cli.worker.die_with_parent", lambda: None)
    monkeypatch.setattr("phalanx.pipeline.run_worker", lambda *arguments: calls.append(arguments))
    path = tmp_path / "worker.toml"
    path.write_text(dump_toml(worker(tmp_path)).partition("\n[")[0] + "\n" + line)

    assert run_command(["worker", str(path)]) == 2

    said = " ".join(capsys.readouterr().err.split())
    assert "attack is not a key of worker files" in said
    assert "python -m phalanx.lab.attacks.worker" in said
    assert calls == []


def test_of_a_run_only_the_liars_are_started_by_the_laboratory_and_each_with_its_own_lie(tmp_path, spawned):
    second = AttackConfig(kind="forward_sign_flip", stages=(2,))
    attack = AttackConfig(kind="gradient_sign", stages=(1,), also=(second,))
    configs = {f"worker-{number}": worker(tmp_path) for number in (1, 2, 3)}

    with attackers_of(attack)(tmp_path / "run" / "workers") as workers:
        workers.start_workers(configs)

    modules = [command[command.index("-m") + 1] for command in spawned]
    assert modules == ["phalanx.lab.attacks.worker", "phalanx.lab.attacks.worker", "phalanx"]
    found = load_config(tmp_path / "run" / "workers" / "attack.toml", AttackPlan)
    assert {name: one.kind for name, one in found.attackers.items()} == {
        "worker-1": "gradient_sign",
        "worker-2": "forward_sign_flip",
    }
    assert all(one.also == () for one in found.attackers.values())
    assert found.log == str(tmp_path / "run" / "attack.jsonl")


def test_a_liar_is_not_forked_from_the_production_process(tmp_path, spawned):
    fork_server = SimpleNamespace(is_open=True, threads=1, start_worker=lambda name, *_: SimpleNamespace(forked=name))
    others = {"worker-1": ("phalanx.lab.attacks.worker", "attack.toml")}
    workers = LocalWorkers(tmp_path, others=others, fork_server=fork_server)

    workers.start_workers({"worker-1": worker(tmp_path), "worker-2": worker(tmp_path)})

    workers.dismiss_worker("worker-1")
    ((*_, module, attack_file, _),) = spawned
    assert (module, attack_file) == ("phalanx.lab.attacks.worker", "attack.toml")
    assert workers._processes["worker-2"].forked == "worker-2"


def test_training_from_python_never_drops_an_attack_silently(tmp_path):
    with pytest.raises(ConfigError, match="this command starts honest workers only"):
        train(load_run(QUICKSTART), tmp_path / "run")

    assert not (tmp_path / "run").exists()


def test_a_worker_file_that_is_wrong_is_refused(tmp_path, capsys):
    path = tmp_path / "worker.toml"
    path.write_text('identity = "x"\n')

    assert run_command(["worker", str(path)]) == 2
    assert "owner" in capsys.readouterr().err


@pytest.mark.parametrize("option", [[], ["--dry-run"]])
def test_a_run_file_with_an_unknown_attack_is_refused_before_anything_starts(tmp_path, capsys, option):
    arguments = ["train", str(QUICKSTART), "--set", "attack.kind='evil'", "--run-dir", str(tmp_path / "run")]

    assert run_command([*arguments, *option]) == 2

    assert "attack.kind: found 'evil'; choices: none, adaptive" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()
