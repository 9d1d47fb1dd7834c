"""Every help page says all of its words, those in square brackets too."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from phalanx.cli import run_command
from phalanx.cli.app import PANELS, app
from phalanx.serve.deploy import DeploymentPlan

WORDS_IN_BRACKETS = re.compile(r"\[[^\]\s]+\]")


def pages(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command with the words that call it."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from pages(below, (*path, name))


PAGES = dict(pages(typer.main.get_command(app)))


def texts(command: Any) -> str:
    """What the author wrote of a command, its options and the commands that it lists."""
    listed = [below.get_short_help_str(10_000) for below in getattr(command, "commands", {}).values()]
    options = [getattr(parameter, "help", None) or "" for parameter in command.params]
    return " ".join([command.help or "", command.epilog or "", *options, *listed])


@pytest.mark.parametrize("path", PAGES, ids=" ".join)
def test_a_help_page_has_every_word_that_was_written_those_in_square_brackets_and_its_exit_codes(
    path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "500")
    command = PAGES[path]

    assert run_command([*path, "--help"]) == 0

    shown = capsys.readouterr().out
    for word in WORDS_IN_BRACKETS.findall(texts(command)):
        assert word in shown
        assert f"\\{word}" not in shown
    assert set(re.findall(r"[A-Za-z]{3,}", command.help or "")) <= set(re.findall(r"[A-Za-z]{3,}", shown))
    assert hasattr(command, "commands") or "Exit codes: 0 " in shown


def test_there_are_such_words_in_the_help():
    found = {path: WORDS_IN_BRACKETS.findall(texts(command)) for path, command in PAGES.items()}

    assert "[parallel]" in found["train",]
    assert "[split]" in found["enclave", "serve"]
    assert "[expect]" in found["enclave", "appraise"]


def test_the_first_page_lists_every_command_once_below_its_panel(capsys):
    assert run_command(["--help"]) == 0

    shown = re.findall(r"^╭─ ([\w ,]+) ─|^│ ([a-z][a-z-]*)  ", capsys.readouterr().out, re.MULTILINE)
    listed = [panel or command for panel, command in shown if panel != "Options"]
    assert listed == [name for panel, entries in PANELS.items() for name in (panel, *entries)]
    assert set(listed) - set(PANELS) == set(typer.main.get_command(app).commands)


@pytest.mark.parametrize("path", PAGES, ids=" ".join)
def test_every_word_of_a_command_line_is_explained_and_written_once(path):
    command = PAGES[path]
    for parameter in command.params:
        assert parameter.help, parameter.name
        if parameter.param_type_name == "argument":
            # typer adds brackets and dots by itself
            assert not re.search(r"[\[\]]|\.\.\.$", parameter.metavar or ""), parameter.name
        assert not re.search(r"[;,] (default|else) [^:]", parameter.help), parameter.name
    assert hasattr(command, "commands") or "Example: phalanx " in command.epilog


def test_the_help_of_deploy_names_the_defaults_of_its_plan():
    shown = {name: field.default for name, field in DeploymentPlan.model_fields.items()}
    for parameter in PAGES["deploy",].params:
        if named := re.search(r"; default: (\S+)\.$", parameter.help):
            assert named[1] == str(shown[parameter.name])
