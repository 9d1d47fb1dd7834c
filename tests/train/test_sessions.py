"""One session for every engine: what it asks of an engine, and what it leaves behind whichever one runs the steps."""

import contextlib
import io
import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from phalanx.checkpoint import Shard
from phalanx.data import Batch
from phalanx.engine import StepResult
from phalanx.errors import NoHolderError, TrainingError
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.saving.saver import PlainSaver
from phalanx.train.sessions.factory import RunMaterial
from phalanx.train.sessions.session import Session


class CountingLoader:
    """Gives batches of one number, which is where it is."""

    def __init__(self):
        self.number = 0

    def next(self):
        self.number += 1
        ids = torch.full((8, 16), self.number)
        return Batch(ids, ids, tuple(range(8)))

    def state(self):
        return {"number": self.number}

    def load_state(self, state):
        self.number = state["number"]


class FakeEngine:
    """An engine without a model: factory, setup and running engine in one; fails as told."""

    def __init__(self, failures=()):
        self.failures = dict(failures)
        self.asked = []
        self.seen = []
        self.engine = self.trained = self

    @contextlib.contextmanager
    def prepare(self, context):
        self.context = context
        self.material = RunMaterial(
            SimpleNamespace(), SimpleNamespace(num_validation_sequences=0, validation_batch=None), CountingLoader()
        )
        yield self
        self.asked.append("sent home")

    def recover(self, savepoint):
        self.asked.append("recover")

    @contextlib.contextmanager
    def open(self, opening):
        self.asked.append(f"open at {opening.start}")
        self.opening = opening
        self.context.opening(opening.recorder, opening.start, {"kind_of_engine": "fake"})
        self.saver = PlainSaver(
            lambda: iter([Shard(0, {"weight/x": torch.zeros(2)}, len(self.seen))]),
            opening.savepoint,
            self.context.observer(opening.recorder),
        )
        yield self

    def step(self, step, inputs):
        if step in self.failures:
            raise self.failures.pop(step)
        self.seen.append((step, int(inputs.ids[0][0, 0])))
        return StepResult(step, 2.0, inputs.num_targets, 1.0, {}, {}, inputs.digest(), None)

    def measure(self, batches):
        return 3.0

    def settle(self):
        self.asked.append("settle")

    def go_back(self, reason):
        opening = self.opening
        return opening.savepoint.rewind(opening.savepoint.open(), opening.metrics)

    def finish(self):
        self.context.figures.final_weights_digest = "00" * 32
        self.opening.recorder.observe("run_completed", {"final_weights_digest": "00" * 32})


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

    summary = session_of(engine).run(resume=False)

    assert (summary["status"], summary["steps"], summary["final_weights_digest"]) == ("completed", 6, "00" * 32)
    assert engine.seen == [(step, step + 1) for step in range(6)]
    assert [one for one in engine.asked if one != "settle"] == ["recover", "open at 0", "sent home"]
    kinds = [line["kind"] for line in lines(tmp_path, "events.jsonl")]
    assert (kinds[0], kinds[-1], kinds.count("checkpoint_saved")) == ("run_started", "run_completed", 3)


def test_a_step_that_no_guard_looked_at_is_recorded_as_one_attempt_without_audits(session_of, tmp_path):
    session_of(FakeEngine()).run(resume=False)

    told = {(line["attempts"], line["audits"], line["alarms"]) for line in lines(tmp_path, "metrics.jsonl")}

    assert told == {(1, 0, 0)}


def test_without_a_holder_the_run_goes_back_to_where_its_engine_says(session_of):
    engine = FakeEngine({3: NoHolderError("stage 1: no holder is left")})

    summary = session_of(engine).run(resume=False)

    # the checkpoint is of step 2, and its batches come once more
    assert [step for step, _ in engine.seen] == [0, 1, 2, 2, 3, 4, 5]
    assert [batch for _, batch in engine.seen] == [1, 2, 3, 3, 4, 5, 6]
    assert summary["status"] == "completed"


def test_a_failed_step_leaves_a_summary_and_a_state_that_the_next_session_goes_on_from(session_of):
    with pytest.raises(TrainingError, match="on purpose"):
        session_of(FakeEngine({3: TrainingError("on purpose")})).run(resume=False)

    engine = FakeEngine()
    summary = session_of(engine, resume=True).run(resume=True)

    assert engine.seen[0] == (2, 3)
    assert engine.asked[:2] == ["recover", "open at 2"]
    assert (summary["status"], summary["resumed_from"], summary["steps"]) == ("completed", 2, 6)
