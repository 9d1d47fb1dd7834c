"""A checkpoint is gone on from, and exported, with the vocabulary that it was trained with, and with no other."""

import json
from pathlib import Path

import pytest

from phalanx.cli import run_command as command_line
from phalanx.data.tokenizers import ByteBpeTraining, open_tokenizer, train_tokenizer, vocabulary_digest
from phalanx.errors import CheckpointError
from phalanx.train import PastRun, train


def write_vocabulary(path: Path, words: str) -> str:
    tokenizer = train_tokenizer([words * 20], ByteBpeTraining(vocab_size=262))
    path.write_bytes(tokenizer.to_json())
    return vocabulary_digest(tokenizer)


@pytest.fixture
def trained(make_run, quietly, tmp_path):
    """A finished run with a tokenizer from a file, that file, and the digest of its vocabulary."""
    path = tmp_path / "tokenizer.json"
    digest = write_vocabulary(path, "the stage checks the next stage. ")
    run = make_run(f"data.tokenizer={{kind='file', path='{path}'}}", "train.steps=2", "train.validate_every=2")
    quietly(run, tmp_path / "run")
    return run, path, digest


def test_another_vocabulary_of_the_same_size_is_refused_by_resume_and_does_not_reach_an_export(trained, tmp_path):
    run, path, digest = trained
    assert PastRun(tmp_path / "run").open_verified().state["vocabulary"] == digest
    other = write_vocabulary(path, "quite other words, in quite another order. ")

    longer = run.model_copy(update={"train": run.train.model_copy(update={"steps": 3})})
    with pytest.raises(
        CheckpointError, match=rf"the vocabulary {digest[:16]}\.\.\., but that of data\.tokenizer is"
    ) as said:
        train(longer, tmp_path / "run", resume=True)

    facts = said.value.error_facts
    assert (facts["code"], facts["found"], facts["expected"]) == ("PHX-I057", other, digest)
    assert command_line(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert vocabulary_digest(open_tokenizer(tmp_path / "out" / "tokenizer.json", 0)) == digest


def test_a_chat_template_beside_the_vocabulary_changes_nothing(trained, tmp_path):
    _, path, digest = trained
    parts = json.loads(path.read_bytes())
    path.write_text(json.dumps(parts | {"post_processor": None, "decoder": None}, indent=2), encoding="utf-8")
    (path.parent / "chat_template.jinja").write_text("{{ messages }}")

    PastRun(tmp_path / "run").open_verified().check_vocabulary(vocabulary_digest(open_tokenizer(path, 0)))

    assert digest == vocabulary_digest(open_tokenizer(path, 0))


def test_a_checkpoint_of_before_this_version_names_no_vocabulary_and_is_taken(trained, tmp_path):
    checkpoint = PastRun(tmp_path / "run").open_verified()
    del checkpoint.state["vocabulary"]

    checkpoint.check_vocabulary("f" * 64)
