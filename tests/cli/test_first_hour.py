"""What a new user meets first: warnings of conversations that are read as text, paths, and what a dry run says."""

import io
import json

import pytest
from rich.console import Console

from phalanx.cli import run_command as command_line
from phalanx.train import describe_run, drill_result, load_run
from tiny_run_file import tiny_run_file

CHAT = {"messages": [{"role": "user", "content": "two and two?"}, {"role": "assistant", "content": "four"}]}
TWO_STAGES = "[pipeline]\nstages = 2\n"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty directory with conversations, a run file that reads them as text, and a recipe that does."""
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"messages": [{**one, "content": f"{one['content']} {n * 7919:x}"} for one in CHAT["messages"]]})
            for n in range(400)]  # fmt: skip
    (tmp_path / "chats.jsonl").write_text("\n".join(rows) + "\n")
    source = '{ kind = "dialogue", path = "chats.jsonl" }'
    (tmp_path / "run.toml").write_text(tiny_run_file(TWO_STAGES).replace('{ kind = "python_manual" }', source))
    (tmp_path / "recipe.toml").write_text(
        f"sources = [{source}]\ntokenizer = {{ kind = 'bpe', vocab_size = 300 }}\n[output]\nsigner = 'signer.key'\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("train run.toml --dry-run", 0),
        ("data sample run.toml", 0),
        ("data build recipe.toml --dry-run", 0),
        ("data build recipe.toml --out made", 0),
        ("init new.toml --kind scratch --data chats.jsonl", 0),
        pytest.param("train run.toml --set train.steps=1", 0, marks=pytest.mark.slow),
    ],
)
def test_a_conversation_that_is_read_as_text_is_told_by_every_command(place, capfd, command, code):
    assert command_line(command.split()) == code

    told = capfd.readouterr().err
    assert "chats.jsonl holds conversations and is read as text" in told
    assert "--kind chat" in told


def test_a_path_that_begins_beside_the_run_file_is_told_with_the_cure(place, capfd):
    (place / "runs").mkdir()
    for name in ("run.toml", "chats.jsonl"):
        (place / name).rename(place / "runs" / name)

    assert command_line(["train", "runs/run.toml", "--dry-run"]) == 2

    told = " ".join(capfd.readouterr().err.split())
    assert "it lies beside the run file: write runs/chats.jsonl, or start phalanx in runs" in told


def test_a_path_that_is_nowhere_is_told_with_the_place_where_it_was_looked_for(place, capfd):
    (place / "chats.jsonl").unlink()

    assert command_line(["train", "run.toml", "--dry-run"]) == 3

    told = " ".join(capfd.readouterr().err.split())
    assert f"chats.jsonl: not found; give the path of a file or a directory; relative paths start at {place}" in told


def shown(run):
    page = io.StringIO()
    Console(file=page, width=200).print(describe_run(run))
    return page.getvalue()


def test_a_dry_run_says_what_the_data_at_hand_come_to_and_shows_what_differs_from_defaults(place):
    told = shown(load_run(place / "run.toml"))

    assert "training: 6 steps, at most 768 tokens" in told
    assert "sequences to train on (at most" in told
    assert "epochs;" in told and "held out" in told
    assert "time: about" in told
    assert "disk: " in told and "of checkpoints" in told
    assert 'kind = "dialogue"' in told
    assert "batch_size = 8" in told
    for default in ("max_failed_batches", "patience_s", "\neps =", "keep_every", "third_party_audit_rate"):
        assert default not in told


def test_a_dry_run_counts_pairs_and_labelled_texts(place):
    pair = {"prompt": "two and two?", "chosen": "four", "rejected": "five"}
    (place / "pairs.jsonl").write_text("".join(json.dumps({**pair, "prompt": f"{n}?"}) + "\n" for n in range(40)))
    text = tiny_run_file(TWO_STAGES).replace(
        'sources = [{ kind = "python_manual" }]', "preferences = { sources = [{ path = 'pairs.jsonl' }] }"
    )
    (place / "pairs.toml").write_text(text)

    assert "pairs to train on" in shown(
        load_run(
            place / "pairs.toml",
            ["train.objective={kind='simpo'}", "train.microbatches=2", "data.tokenizer.vocab_size=258"],
        )
    )


@pytest.mark.parametrize(
    "command", ["generate nowhere --prompt x", "checkpoint export nowhere out", "checkpoint verify nowhere"]
)
def test_a_directory_that_is_missing_is_told_before_torch_is_imported(place, command):
    import subprocess
    import sys

    program = (
        "import sys; from phalanx.cli import run_command; "
        f"code = run_command({command.split()!r}); print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    code, has_torch = done.stdout.split()
    assert int(code) != 0
    assert has_torch == "False"
    assert "nowhere" in done.stderr


VERDICT = {"party": "worker-1", "stage": 1, "step": 41, "offence": "forward", "reason": "-"}
DRILL = {
    **{"status": "completed", "guard": "phalanx", "attacks_injected": 1, "detections": 1, "false_accusations": 0},
    **{"verdicts": [VERDICT], "steps_redone": 41, "in_doubt": False},
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {},
            ["of 1 step with a lie the guard detected 1", "worker-1 at stage 1 in step 41", "no lie is in the weights"],
        ),
        ({"steps_redone": 0}, ["the lie was discarded", "no lie is in the weights"]),
        ({"in_doubt": True, "attacks_injected": 3}, ["of 3 steps", "are in the weights"]),
        ({"verdicts": [], "detections": 0}, ["a party lied in 1 step, and no party was named"]),
        ({"guard": "off", "verdicts": []}, ["without a guard the lie was not detected"]),
        ({"false_accusations": 1}, ["1 of the verdicts are against honest parties"]),
    ],
)
def test_a_drill_ends_with_what_it_has_shown(changes, words):
    told = drill_result({**DRILL, **changes})

    assert told.startswith("What this run shows: ")
    assert all(word in told for word in words), told
    assert "\n" not in told


@pytest.mark.parametrize("changes", [{"attacks_injected": 0}, {"attacks_injected": None}, {"status": "interrupted"}])
def test_a_run_without_a_drill_or_an_end_claims_nothing(changes):
    assert drill_result({**DRILL, **changes}) is None
