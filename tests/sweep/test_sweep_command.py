"""``phalanx sweep`` as it is typed."""

import json

import pytest
from fake_trials import FakeTrials, write_files

from phalanx.cli import run_command


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr("phalanx.sweep.trial.RunTrials", lambda _open_log: FakeTrials())
    monkeypatch.setattr("phalanx.sweep.RunTrials", lambda _open_log: FakeTrials(), raising=False)


def test_a_search_prints_its_trials_and_the_winner(tmp_path, monkeypatch, capsys, fake):
    write_files(tmp_path, "trials = 6")
    monkeypatch.chdir(tmp_path)

    assert run_command(["sweep", "sweep.toml"]) == 0

    shown = capsys.readouterr().out
    assert "wins: --set optimizer.lr=" in shown and "again, seed 12" in shown
    assert (tmp_path / "runs" / "sweep" / "sweep.json").exists()
    # a search that is done is not begun anew
    assert run_command(["sweep", "sweep.toml"]) == 2
    assert "--resume" in capsys.readouterr().err
    assert run_command(["sweep", "sweep.toml", "--resume", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["values"] == answer["trials"][answer["winner"]]["values"]


def test_a_mistake_in_the_file_names_the_key(tmp_path, capsys):
    write_files(tmp_path, space='"optimizer.lrr" = { choices = [0.1, 0.2] }')

    assert run_command(["sweep", str(tmp_path / "sweep.toml")]) == 2
    assert "space.optimizer.lrr" in capsys.readouterr().err
    write_files(tmp_path, "trialls = 3")
    assert run_command(["sweep", str(tmp_path / "sweep.toml"), "--json"]) == 2
    assert "did you mean 'trials'" in capsys.readouterr().out
