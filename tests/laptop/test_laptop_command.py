"""`phalanx laptop` up to its first phase: the plan, the folder, and what is refused before anything is trained."""

import json
import os
import tomllib
from pathlib import Path

import pytest
from made_texts import write_texts

from phalanx.cli.outcome import run_command
from phalanx.laptop.folder import hold_folder
from phalanx.laptop.probe import Measured
from phalanx.train import load_run


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    """Texts in a folder of this test's own, on a machine whose speed is given."""
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "texts")
    monkeypatch.setattr(
        "phalanx.laptop.probe.measure_shape",
        lambda shape, *_: Measured(1e-4 * shape.hidden / 64, 5e-5 * shape.hidden / 64),
    )


def laptop(*arguments):
    return run_command(["laptop", "texts", "--minutes", "3", *arguments])


def test_a_dry_run_prints_model_and_times_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")

    assert laptop("--dry-run") == 0

    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 60 for line in lines)
    text = "\n".join(lines)
    assert all(word in text for word in ("parameters", "tokens/s", "pretrain", "preferences", "whole time"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts"]


def test_the_plan_as_json_has_an_estimate_for_each_phase(capsys):
    assert laptop("--dry-run", "--json") == 0

    facts = json.loads(capsys.readouterr().out)
    assert facts["dry_run"] is True
    assert list(facts["estimates_s"]) == ["tokenizer", "pretrain", "chat", "preferences", "evaluate", "report"]


def test_prepared_files_are_ordinary_run_files_and_their_folder_says_what_lies_where(monkeypatch, capsys):
    assert laptop("--prepare") == 0

    monkeypatch.chdir("laptop")
    for name in ("pretrain", "chat", "preferences"):
        load_run(f"{name}.toml")
    readme = Path("README.md").read_text()
    assert all(f"`{name}`" in readme for name in os.listdir() if name.endswith(".toml"))
    assert "$" not in readme


def test_the_same_command_keeps_the_plan_and_changed_run_files(capsys):
    laptop("--prepare")
    plan = Path("laptop/plan.toml").read_text()
    with open("laptop/chat.toml", "a") as file:
        file.write("# my change\n")

    assert laptop("--prepare") == 0

    assert Path("laptop/plan.toml").read_text() == plan
    assert Path("laptop/chat.toml").read_text().endswith("# my change\n")


def test_another_time_and_other_texts_are_refused_in_a_folder_that_was_begun(capsys):
    laptop("--prepare")

    assert laptop("--prepare", "--minutes", "9") == 2
    assert "minutes 3.0 (now 9.0)" in capsys.readouterr().err
    with open("texts/more.txt", "w") as file:
        file.write("one more")
    assert laptop("--prepare") == 2
    assert "was begun with other texts" in capsys.readouterr().err


def test_a_folder_of_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "laptop").mkdir()
    (tmp_path / "laptop" / "thesis.tex").write_text("mine")

    assert laptop("--prepare") == 2

    assert "choose a new folder with --out" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "laptop").iterdir()] == ["thesis.tex"]


def test_a_second_command_in_the_same_folder_is_refused(tmp_path, capsys):
    laptop("--prepare")

    with hold_folder(tmp_path / "laptop"):
        assert laptop() == 2

    assert "another phalanx laptop runs there" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--resume", "--redo=chat"])
def test_there_is_nothing_to_resume_in_a_new_folder(option, capsys):
    assert laptop(option) == 3

    assert "nothing to resume or repeat" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "line", "found"),
    [
        ("--data-sft", '{"text": "only a text"}', "text"),
        ("--data-sft", '{"prompt": "a", "chosen": "b", "rejected": "c"}', "pairs"),
        ("--data-preferences", '{"messages": [{"role": "user", "content": "a"}]}', "chat"),
        ("--data-preferences", '{"prompt": "a", "completion": "b", "label": true}', "labelled"),
    ],
)
def test_rows_of_another_kind_are_refused_before_anything_is_measured(option, line, found, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(f"{line}\n" * 50)

    assert laptop(option, "rows.jsonl") == 2

    assert f"holds {found}; expected JSON lines with" in capsys.readouterr().err


def test_rows_of_the_user_stand_in_the_run_files(tmp_path, capsys):
    chats = [
        {"messages": [{"role": "user", "content": f"a {n}"}, {"role": "assistant", "content": "b"}]} for n in range(60)
    ]
    pairs = [{"prompt": f"a {n}", "chosen": "b", "rejected": "c"} for n in range(60)]
    for name, rows in (("chats", chats), ("pairs", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert laptop("--prepare", "--data-sft", "chats.jsonl", "--data-preferences", "pairs.jsonl") == 0

    chat, preferences = (tomllib.loads(Path(f"laptop/{name}.toml").read_text()) for name in ("chat", "preferences"))
    assert chat["data"]["conversations"]["sources"][0]["path"] == str(tmp_path / "chats.jsonl")
    assert preferences["data"]["preferences"]["sources"][0]["path"] == str(tmp_path / "pairs.jsonl")
    assert not os.path.exists("laptop/texts/chats.jsonl")


def test_an_empty_folder_and_too_little_time_end_with_their_exit_codes(tmp_path, capsys):
    (tmp_path / "empty").mkdir()

    assert run_command(["laptop", "empty"]) == 3
    assert run_command(["laptop", "texts", "--minutes", "0.1"]) == 2
    assert "too short on this machine" in capsys.readouterr().err
