"""An attack of the user's own is loaded by the laboratory from its own file, played, and its party named."""

import pytest

from phalanx.config import load_config
from phalanx.config.own_code import pin_reference
from phalanx.errors import ConfigError
from phalanx.lab.attacks import AttackPlan, attackers_of, check_attack, load_attack, make_actor
from phalanx.lab.attacks import worker as laboratory
from phalanx.lab.bench.detection.drill_plan import Drill, drill_attacks
from phalanx.pipeline import AttackConfig, GuardConfig
from phalanx.testing import MemoryCompany, tiny_run

HALVE = """
from phalanx.lab.attacks import MessageAttack


class Halve(MessageAttack):
    def lie(self, work, generator):
        return work.result / 2
"""


@pytest.fixture
def config(tmp_path):
    """A section that names it."""
    (tmp_path / "mine.py").write_text(HALVE)
    return AttackConfig(kind=pin_reference("mine.py:Halve", tmp_path), stages=(1,), from_step=1)


def test_its_party_is_named_by_the_guard(config, tmp_path):
    with pytest.raises(ConfigError, match="code that this process has not loaded"):
        check_attack(config)
    load_attack(config, tmp_path)
    run = tiny_run(guard=GuardConfig(audit_rate=1.0, step_audit_rate=0.0, owner_audit_rate=0.0))

    with MemoryCompany(run, tmp_path / "run", {"worker-1": make_actor(config, "worker-1")}) as company:
        company.run(2)
        assert [verdict.party for verdict in company.verdicts] == ["worker-1"]


def test_the_worker_of_the_laboratory_is_told_where_its_file_is(config, tmp_path):
    with attackers_of(config, home=tmp_path)(tmp_path / "run" / "workers"):
        plan = load_config(tmp_path / "run" / "workers" / "attack.toml", AttackPlan)

    assert (plan.home, plan.attackers["worker-1"].kind) == (str(tmp_path), config.kind)


def test_a_worker_started_by_hand_finds_it_beside_its_own_file(config, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(laboratory, "run_attacker", lambda plan, worker: calls.append(plan.attackers["worker-1"].kind))
    attack, worker = tmp_path / "attack.toml", tmp_path / "worker.toml"
    attack.write_text('[attackers.worker-1]\nkind = "mine.py:Halve"\n')
    worker.write_text(f'identity = "{tmp_path}/worker-1"\nowner = "127.0.0.1:1"\n')

    laboratory._run_plan([str(attack), str(worker)])

    assert calls == [config.kind]


def test_a_drill_takes_it_by_name(config, tmp_path):
    run = tiny_run()
    object.__setattr__(run, "_home", tmp_path)

    assert list(drill_attacks(run, Drill(kinds=["mine.py:Halve"]))) == [config.kind]


def test_an_object_that_is_no_attack_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("def Halve():\n    pass\n")
    config = AttackConfig(kind=pin_reference("mine.py:Halve", tmp_path), stages=(1,))
    load_attack(config, tmp_path)

    with pytest.raises(ConfigError, match="found a function; expected a class that inherits from"):
        check_attack(config)
