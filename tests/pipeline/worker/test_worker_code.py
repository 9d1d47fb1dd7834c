"""A worker runs a family of the user's own where its own file names the very code, never because an owner says so."""

from types import SimpleNamespace

import pytest

from phalanx.config import resolve_kind
from phalanx.config.own_code import pin_reference
from phalanx.errors import ConfigError
from phalanx.pipeline import PartyLayout, WorkerCode, WorkerConfig
from phalanx.pipeline.worker import process
from phalanx.pipeline.worker.process import check_code
from phalanx.pipeline.worker.worker_file import load_worker


@pytest.fixture
def worker_file(tmp_path):
    """Writes a worker file that names this code."""

    def write(code):
        path = tmp_path / "worker.toml"
        path.write_text(f'identity = "keys"\nowner = "127.0.0.1:1"\n{code}')
        return path

    (tmp_path / "mine.py").write_text("cwm = 'a family'\n")
    return write


def plan(family, model_type="cwm"):
    return SimpleNamespace(family=family, hub_config={"model_type": model_type})


NAMED = '[[code]]\nkind = "mine.py:cwm"\n'


def test_a_worker_file_pins_the_code_beside_it_without_running_it(worker_file, tmp_path):
    (tmp_path / "mine.py").write_text("raise RuntimeError('ran')\n")

    config = load_worker(worker_file(NAMED))

    assert [one.kind for one in config.code] == [pin_reference("mine.py:cwm", tmp_path)]
    assert config.code_home == str(tmp_path)


def test_the_same_code_in_another_file_is_the_same_code(worker_file, tmp_path):
    config = load_worker(worker_file(NAMED))
    (tmp_path / "owners").mkdir()
    (tmp_path / "owners" / "families.py").write_text((tmp_path / "mine.py").read_text())

    check_code(plan(pin_reference("families.py:cwm", tmp_path / "owners")), config)
    check_code(plan(None, "gpt2"), config)


def test_code_that_the_owner_names_is_refused_where_the_worker_file_does_not(worker_file, tmp_path):
    theirs = pin_reference("mine.py:cwm", tmp_path)

    with pytest.raises(
        ConfigError, match=rf"model family is {theirs}, but this worker's file names none; if you trust that code"
    ):
        check_code(plan(theirs), load_worker(worker_file("")))

    with pytest.raises(ConfigError, match="code that this process has not loaded"):
        resolve_kind(theirs, {}, lambda _said, found: found)


@pytest.mark.parametrize("changed", ["cwm = 'another family'\n", "cwm = 'a family'\n\n"])
def test_other_code_under_the_same_name_is_refused(worker_file, tmp_path, changed):
    theirs = pin_reference("mine.py:cwm", tmp_path)
    (tmp_path / "mine.py").write_text(changed)

    with pytest.raises(
        ConfigError, match=r"model family is mine\.py:cwm@.*, but this worker's file names mine\.py:cwm@"
    ):
        check_code(plan(theirs), load_worker(worker_file(NAMED)))


def test_a_worker_does_not_put_its_own_family_under_a_plan_that_names_none(worker_file, monkeypatch):
    monkeypatch.setattr(process, "ADOPTED", {"cwm"})

    with pytest.raises(ConfigError, match="is a family of the package, but this worker's file names mine"):
        check_code(plan(None), load_worker(worker_file(NAMED)))


def test_code_is_for_a_worker_of_one_process():
    code = (WorkerCode(kind="mine.py:cwm"),)

    with pytest.raises(ValueError, match="code needs a worker of one process"):
        WorkerConfig(identity="keys", owner="127.0.0.1:1", code=code, parallel=PartyLayout(tp=2))
