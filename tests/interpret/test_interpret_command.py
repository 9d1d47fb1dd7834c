"""``phalanx interpret`` as it is typed: of a run, of its checkpoint and of a model directory."""

import io
import json

import pytest

from phalanx.cli import run_command
from tiny_run_file import tiny_run_file

TEXT = "the list of names"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory with a run of two steps, and its model without the run; not to be changed."""
    home = tmp_path_factory.mktemp("interpret")
    (home / "run.toml").write_text(
        tiny_run_file("[pipeline]\nstages = 1\n[checkpoint]\nevery = 1\njournal = false\n", steps=2, validate_every=0)
    )
    assert run_command(["train", str(home / "run.toml"), "--run-dir", str(home / "run")]) == 0
    assert run_command(["checkpoint", "export", str(home / "run"), str(home / "model")]) == 0
    return home


def answer_of(capsys, *words):
    capsys.readouterr()
    assert run_command(["interpret", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("place", ["run", "run/checkpoints/step-00000002", "model"])
def test_each_command_opens_a_run_a_checkpoint_and_a_model(trained, tmp_path, capsys, place):
    dataset = () if place != "model" else ("--dataset", next((trained / ".cache").rglob("dataset.json")).parent)
    where = trained / place

    loss = answer_of(capsys, "loss", where, "--text", TEXT, "--html", tmp_path / "loss.html")
    layers = answer_of(capsys, "layers", where, "--text", TEXT, "--tokens", 2, "--html", tmp_path / "layers.html")
    near = answer_of(
        capsys, "documents", where, "--text", TEXT, "--shown", 2, *dataset, "--html", tmp_path / "near.html"
    )

    losses = [token["loss"] for token in loss["tokens"][1:]]
    assert "".join(token["text"] for token in loss["tokens"]) == TEXT
    assert loss["mean_loss"] == pytest.approx(sum(losses) / len(losses))
    assert [len(layer["tokens"]) for layer in layers["layers"]] == [2] * 5
    assert "".join(layers["prompt"]) == TEXT
    assert [len(near["documents"]), near["documents"][0]["source"]] == [2, "python_manual"]
    for answer, name in ((loss, "loss"), (layers, "layers"), (near, "near")):
        assert answer["page"] == str(tmp_path / f"{name}.html")
        assert "<script" not in (tmp_path / f"{name}.html").read_text()


def test_an_earlier_step_of_a_run_has_other_losses(trained, capsys):
    means = [answer_of(capsys, "loss", trained / "run", "--step", step, "--text", TEXT)["mean_loss"] for step in (1, 2)]

    assert means[0] != means[1]


def test_a_text_comes_from_standard_input_and_is_printed_with_its_guesses(trained, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))

    assert run_command(["interpret", "loss", str(trained / "run")]) == 0

    assert TEXT in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["loss", "gone", "--text", TEXT], 3, "neither a run"),
        (["loss", "model", "--text", "a"], 3, "expected 2 to"),
        (["documents", "model", "--text", TEXT], 2, "--dataset"),
        (["layers", "run", "--step", "9", "--text", TEXT], 3, "9"),
        (["documents", "run", "--text", TEXT, "--signer", "ab" * 32], 3, "signed with key"),
    ],
)
def test_a_mistake_has_its_exit_code_and_names_what_is_wrong(trained, capsys, monkeypatch, words, code, message):
    monkeypatch.chdir(trained)

    assert run_command(["interpret", *words]) == code
    assert message in capsys.readouterr().err
