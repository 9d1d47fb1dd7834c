"""``phalanx eval``: figures, files, gates and comparisons on the command line; and the page's example."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli import run_command
from phalanx.cli.app import app
from phalanx.evaluate import read_result
from tiny_edge_models import write_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evaluation.md"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {family: str(write_model(folder / family, family)) for family in ("llama", "gpt2")}


def call(*arguments):
    return CliRunner().invoke(app, ["eval", *arguments], env={"COLUMNS": "120"})


def test_the_example_of_the_page_is_what_the_command_prints(models):
    example = re.search(r"```console\n\$ (phalanx eval models/tiny.*?)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    arguments = example.group(1).split()[2:]
    result = call(models["llama"], *arguments[1:])

    assert result.exit_code == 0
    printed = [line.split() for line in result.stdout.splitlines() if line.strip()]
    shown = [line.split() for line in example.group(2).splitlines() if line.strip()]
    assert printed == shown


def test_all_files_are_written_and_hold_the_same_figures(models, tmp_path):
    files = {name: tmp_path / f"result.{name}" for name in ("json", "md", "html")}
    result = call(
        *(models["llama"], "--suite", "facts", "--suite", "safety", "--limit", "4", "--against", models["gpt2"]),
        *("--out", str(files["json"]), "--markdown", str(files["md"]), "--page", str(files["html"])),
        *("--inspect", str(tmp_path / "logs")),
    )

    assert result.exit_code == 0, result.output
    stored = read_result(files["json"])
    assert {suite.name for suite in stored.suites} == {"facts", "safety"}
    assert stored.model["template_digest"]
    page, markdown = files["html"].read_text(), files["md"].read_text()
    for suite in stored.suites:
        assert suite.suite_digest in page
        assert suite.suite_digest in markdown
    assert "McNemar" in page
    (named,) = (tmp_path / "logs").glob("*_facts_*.json")
    log = json.loads(named.read_text())
    assert log["results"]["scores"][0]["metrics"]["accuracy"]["value"] == stored.figures["facts.accuracy"].value
    again = call(models["gpt2"], "--suite", "facts", "--limit", "4", "--against", str(files["json"]))
    assert again.exit_code == 0
    assert "facts.accuracy" in again.output


def test_a_gate_ends_with_5_and_the_answer_is_still_there(models, capfd):
    code = run_command(
        ["eval", models["llama"], "--suite", "facts", "--limit", "4", "--fail-below", "facts.accuracy=1.1", "--json"]
    )
    answer = json.loads(capfd.readouterr().out)

    assert code == 5
    assert answer["error"]["code"] == "PHX-V160"
    assert answer["suites"][0]["figures"]
    assert (
        run_command(["eval", models["llama"], "--suite", "facts", "--limit", "4", "--fail-below", "facts.accuracy=0"])
        == 0
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a run"),
        (["{model}", "--suite", "none"], "there is no such suite"),
        (["{model}", "--tasks", "a"], "belong together"),
        (["{model}", "--fail-below", "x"], "expected suite.metric"),
        (["{model}", "--text", "x"], "expected NAME=FILE"),
        (["{folder}"], "neither a run"),
        (["http://127.0.0.1:9"], "name the model on the server"),
    ],
)
def test_a_mistake_is_named(models, tmp_path, capfd, arguments, message):
    values = {"model": models["llama"], "folder": str(tmp_path)}
    code = run_command(["eval", *(part.format(**values) for part in arguments)])

    assert code in (2, 3)
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("against", ["gone.json", "empty.json", "gone"])
def test_what_is_nothing_to_compare_with_is_told_before_a_model_is_opened(tmp_path, capfd, against):
    (tmp_path / "empty.json").write_text("{}")

    code = run_command(["eval", str(tmp_path / "no model"), "--against", str(tmp_path / against)])

    assert code == 3
    assert against in capfd.readouterr().err


def test_a_comparison_that_fails_loses_nothing_that_was_measured(models, tmp_path):
    other, out = tmp_path / "other.json", tmp_path / "out.json"
    suite = ["--suite", "facts", "--limit", "2"]
    assert run_command(["eval", models["llama"], *suite, "--seed", "1", "--out", str(other)]) == 0

    assert run_command(["eval", models["llama"], *suite, "--against", str(other), "--out", str(out)]) == 3
    assert read_result(out).figures


def test_figures_and_digests_do_not_depend_on_the_place_of_the_model(models, tmp_path):
    shutil.copytree(models["llama"], tmp_path / "copy")
    suites = ["--suite", "facts", "--suite", "prose", "--limit", "4"]
    call(models["llama"], *suites, "--batch", "1", "--out", str(tmp_path / "a.json"))
    call(str(tmp_path / "copy"), *suites, "--batch", "1", "--out", str(tmp_path / "b.json"))

    one, other = read_result(tmp_path / "a.json"), read_result(tmp_path / "b.json")
    assert one.figures == other.figures
    assert one.model == other.model
