"""The command prints a table or one JSON object, and refuses a table that no paper has."""

import json
import sys
from types import ModuleType

import pytest

from phalanx.cli import run_command

RESULT = {
    "name": "defence",
    "command": "phalanx reproduce defence --quick",
    "commit": None,
    "load": 0.1,
    "missing": 0,
    "summary": [{"arm": "clean"}],
    "rows": [],
}


@pytest.fixture
def calls(monkeypatch):
    made = []

    def reproduce(table, *, size, only_finished, home):
        made.append((table, size, only_finished, home))
        return RESULT

    module = ModuleType("phalanx.lab.reproduce")
    vars(module).update(
        CELLS={"defence": None, "vulnerability": None},
        reproduce=reproduce,
        as_tables=lambda summary: {"gpt2, manual, plain": [{"arm": "clean", "no attack": "88.1 / 90.2"}]},
    )
    monkeypatch.setitem(sys.modules, "phalanx.lab.reproduce", module)
    return made


def test_reproduce_prints_a_table(calls, capsys):
    assert run_command(["reproduce", "defence", "--quick"]) == 0

    assert calls == [("defence", "quick", False, None)]
    shown = capsys.readouterr().out
    assert "gpt2, manual, plain" in shown
    assert "88.1 / 90.2" in shown


def test_reproduce_json_is_one_object_on_stdout_and_in_the_file(calls, capsys, tmp_path):
    out = tmp_path / "sub" / "defence.json"

    assert run_command(["reproduce", "defence", "--json", "--finished", "--out", str(out)]) == 0

    assert calls == [("defence", "full", True, None)]
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text()) == RESULT


def test_an_unknown_table_names_the_choices(calls, capsys):
    assert run_command(["reproduce", "defense"]) == 2

    assert (
        capsys.readouterr().err
        == "error: reproduce: unknown table 'defense'; choices: backdoor, defence, domains, leaks, medical, "
        "stage-leaks, vulnerability [PHX-C002]\n"
    )


def test_reproduce_small_is_a_size_of_its_own(calls, capsys):
    assert run_command(["reproduce", "defence", "--small"]) == 0
    assert run_command(["reproduce", "defence", "--small", "--quick"]) == 2

    assert calls == [("defence", "small", False, None)]
    assert "choose one" in capsys.readouterr().err


def test_reproduce_learned_reads_data_files_and_is_for_the_two_tables(calls, capsys, tmp_path):
    assert run_command(["reproduce", "vulnerability", "--learned", "--data", str(tmp_path)]) == 0
    assert run_command(["reproduce", "leaks", "--learned"]) == 2

    assert calls == [("vulnerability", "learned", False, tmp_path)]
    assert "leaks has no size 'learned'" in capsys.readouterr().err


LEAKS = {
    "name": "leaks",
    "command": "phalanx reproduce leaks",
    "commit": None,
    "load": 0.1,
    "missing": 1,
    "model": {"name": "smollm2-135m"},
    "summary": [{"depth": 4}],
    "adapters": [{"tokens": 8}],
}


@pytest.fixture
def leak_calls(calls, monkeypatch):
    made = []

    def measure_leaks(*, size, only_finished):
        made.append((size, only_finished))
        return LEAKS

    module = ModuleType("phalanx.lab.reproduce.leaks")
    vars(module).update(measure_leaks=measure_leaks, as_lines=lambda summary: [{"cut": "4", "plaintext": "99.2 %"}])
    vars(module).update(adapter_lines=lambda rows: [{"tokens of the batch": "8", "plaintext": "87.5 %"}])
    monkeypatch.setitem(sys.modules, "phalanx.lab.reproduce.leaks", module)
    return made


def test_reproduce_leaks_prints_the_leak_table(leak_calls, calls, capsys):
    assert run_command(["reproduce", "leaks", "--quick"]) == 0

    assert leak_calls == [("quick", False)]
    assert calls == []
    shown = capsys.readouterr().out
    assert "smollm2-135m" in shown
    assert "99.2 %" in shown
    assert "87.5 %" in shown


def test_reproduce_leaks_json_is_one_object_on_stdout_and_in_the_file(leak_calls, capsys, tmp_path):
    out = tmp_path / "leaks.json"

    assert run_command(["reproduce", "leaks", "--json", "--finished", "--out", str(out)]) == 0

    assert leak_calls == [("full", True)]
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text()) == LEAKS


@pytest.fixture
def medical_calls(monkeypatch):
    made = []
    found = {
        "name": "medical",
        "command": "phalanx reproduce medical",
        "commit": None,
        "load": 0.1,
        "missing": 0,
        "absent": {"medquad": "not found"},
        "summary": [],
        "comparisons": [{"task": "icd10", "arm": "split_sealed", "against": "fedavg", "difference": 0.02}],
        "rows": [],
    }

    def reproduce_medical(*, size, only_finished, home, table):
        made.append((table, size, only_finished, home))
        return found

    module = ModuleType("phalanx.lab.reproduce.medical")
    vars(module).update(
        SIZES={"full": None, "quick": None},
        DOMAIN_SIZES={"full": None},
        reproduce_medical=reproduce_medical,
        as_tables=lambda summary: {"icd10": [{"arm": "split_sealed", "accuracy": "0.812 ± 0.031"}]},
    )
    monkeypatch.setitem(sys.modules, "phalanx.lab.reproduce.medical", module)
    return made


def test_the_medical_table_shows_arms_differences_and_what_is_absent(calls, medical_calls, capsys, tmp_path):
    assert run_command(["reproduce", "medical", "--quick", "--data", str(tmp_path)]) == 0

    assert medical_calls == [("medical", "quick", False, tmp_path)]
    shown = capsys.readouterr().out
    assert "0.812 ± 0.031" in shown
    assert "paired by seed" in shown
    assert "not found" in shown


def test_texts_of_other_domains_are_a_table_of_their_own(calls, medical_calls):
    assert run_command(["reproduce", "domains", "--finished"]) == 0

    assert medical_calls == [("domains", "full", True, None)]


def test_what_a_table_does_not_have_is_refused(calls, medical_calls, capsys, tmp_path):
    assert run_command(["reproduce", "medical", "--small"]) == 2
    assert run_command(["reproduce", "medical", "--learned"]) == 2
    assert run_command(["reproduce", "domains", "--quick"]) == 2
    assert run_command(["reproduce", "defence", "--small", "--data", str(tmp_path)]) == 2

    assert (calls, medical_calls) == ([], [])
    assert "reads no data files" in capsys.readouterr().err
