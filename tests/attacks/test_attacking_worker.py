import pytest

from phalanx.attacks import drill, run_worker_with_attack
from phalanx.config import dump_toml
from phalanx.errors import ConfigError
from phalanx.pipeline import AttackConfig, WorkerConfig


@pytest.fixture
def started(monkeypatch):
    """Note how the worker would be run, without a network and without asking the kernel for anything."""
    calls = []
    monkeypatch.setattr(drill, "die_with_parent", lambda: None)
    monkeypatch.setattr(drill, "run_worker", lambda config, *wrap: calls.append((config, wrap)))
    return calls


def worker_file(tmp_path, **changes):
    path = tmp_path / "worker.toml"
    path.write_text(dump_toml(WorkerConfig(identity=str(tmp_path / "worker-1"), owner="127.0.0.1:1", **changes)))
    return path


def test_a_worker_without_an_attack_is_honest(tmp_path, started):
    run_worker_with_attack(worker_file(tmp_path))

    ((_, wrap),) = started
    assert wrap == ()


def test_a_worker_whose_file_says_none_is_honest(tmp_path, started):
    run_worker_with_attack(worker_file(tmp_path, attack=AttackConfig()))

    ((_, wrap),) = started
    assert wrap == ()


def test_a_worker_with_an_attack_lies_under_its_own_name(tmp_path, started):
    log = tmp_path / "attack.jsonl"

    run_worker_with_attack(worker_file(tmp_path, attack=AttackConfig(kind="forward_sign_flip"), attack_log=str(log)))

    ((config, (wrap,)),) = started
    assert config.attack is not None
    assert callable(wrap)


def test_an_unknown_attack_ends_the_worker_before_it_joins(tmp_path, started):
    with pytest.raises(ConfigError, match=r"attack\.kind"):
        run_worker_with_attack(worker_file(tmp_path, attack=AttackConfig(kind="evil")))

    assert started == []


def test_a_file_that_is_wrong_is_refused(tmp_path, started):
    path = tmp_path / "worker.toml"
    path.write_text('identity = "x"\n')

    with pytest.raises(ConfigError, match="owner"):
        run_worker_with_attack(path)

    assert started == []
