"""One session for every engine: what it asks of an engine, and what it leaves behind whichever one runs the steps."""

import io
import json

import pytest
from blake3 import blake3
from fake_engine import FakeEngine
from rich.console import Console

from phalanx.errors import NoHolderError, TrainingError
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.records.samples import StepSamples, samples_digest
from phalanx.train.sessions.session import Session, clear_tokens_note


@pytest.fixture
def session_of(make_run, tmp_path):
    def build(engine, *, resume=False):
        run = make_run()
        home = RunDirectory(tmp_path / "run", run, resume=resume)
        return Session(run, home, Console(file=io.StringIO(), width=200), engine)

    return build


def lines(tmp_path, name):
    return [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]


def test_whatever_keeps_the_protocol_is_trained_recorded_and_saved(session_of, tmp_path):
    engine = FakeEngine()

    summary = session_of(engine).run_session(resume=False)

    assert (summary["status"], summary["steps"], summary["final_weights_digest"]) == ("completed", 6, "00" * 32)
    assert engine.seen == [(step, step + 1) for step in range(6)]
    assert [one for one in engine.asked if one != "settle"] == ["recover", "open at 0", "sent home"]
    kinds = [line["kind"] for line in lines(tmp_path, "events.jsonl")]
    assert (kinds[0], kinds[-1], kinds.count("checkpoint_saved")) == ("run_started", "run_completed", 3)


def test_a_step_that_no_guard_looked_at_is_recorded_as_one_attempt_without_audits(session_of, tmp_path):
    session_of(FakeEngine()).run_session(resume=False)

    told = {(line["attempts"], line["audits"], line["alarms"]) for line in lines(tmp_path, "metrics.jsonl")}

    assert told == {(1, 0, 0)}


def test_the_log_names_the_whole_corpus_and_each_line_its_samples(session_of, tmp_path):
    session_of(FakeEngine()).run_session(resume=False)

    opening = next(line["body"] for line in lines(tmp_path, "events.jsonl") if line["kind"] == "run_started")
    assert opening["corpus"] == "c0" * 32
    assert {line["samples_digest"] for line in lines(tmp_path, "metrics.jsonl")} == {samples_digest(range(8))}
    assert samples_digest(range(8)) == blake3(b"phalanx/samples/1\0[0,1,2,3,4,5,6,7]").hexdigest()


def test_samples_are_those_of_the_batch_that_took_the_place_of_a_failed_one():
    samples = StepSamples()

    samples.note_samples(3, [1, 2])
    samples.note_samples(3, [4, 5])

    assert samples.digest_of_step(3) == samples_digest([4, 5]) != samples_digest([5, 4])
    assert samples.digest_of_step(2) is None


def test_samples_of_old_steps_are_forgotten():
    samples = StepSamples()

    for step in range(5000):
        samples.note_samples(step, [step])

    assert [samples.digest_of_step(step) is None for step in (0, 903, 904, 4999)] == [True, True, False, False]


def test_without_a_holder_the_run_goes_back_to_where_its_engine_says(session_of):
    engine = FakeEngine({3: NoHolderError("stage 1: no holder is left")})

    summary = session_of(engine).run_session(resume=False)

    # the checkpoint is of step 2, and its batches come once more
    assert [step for step, _ in engine.seen] == [0, 1, 2, 2, 3, 4, 5]
    assert [batch for _, batch in engine.seen] == [1, 2, 3, 3, 4, 5, 6]
    assert summary["status"] == "completed"


def test_a_failed_step_leaves_a_summary_and_a_state_that_the_next_session_goes_on_from(session_of):
    with pytest.raises(TrainingError, match="on purpose"):
        session_of(FakeEngine({3: TrainingError("on purpose")})).run_session(resume=False)

    engine = FakeEngine()
    summary = session_of(engine, resume=True).run_session(resume=True)

    assert engine.seen[0] == (2, 3)
    assert engine.asked[:2] == ["recover", "open at 2"]
    assert (summary["status"], summary["resumed_from"], summary["steps"]) == ("completed", 2, 6)


DATASET = 'data={dataset={path="shards",key_file="seal.key"},sequence_length=8}'
HELD_OUT = 'data.validation=[{name="own",sources=[{kind="text",path="held_out"}]}]'
SEALED = ("checkpoint.encrypt=true", "checkpoint.key='file:ckpt.key'")


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [(SEALED, True), ((*SEALED, DATASET, HELD_OUT), True), ((*SEALED, DATASET), False), ((), False)],
)
def test_an_encrypted_run_says_where_its_tokens_lie_in_the_clear(make_run, tmp_path, monkeypatch, changes, is_told):
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))

    note = clear_tokens_note(make_run(*changes), tmp_path / "run")

    assert (note is not None and f"{tmp_path / 'cache'} in the clear" in note) == is_told
