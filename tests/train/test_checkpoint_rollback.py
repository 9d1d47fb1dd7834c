"""A run without a holder of some stage goes back to its last certified checkpoint, or says that there is none."""

from types import SimpleNamespace

import pytest

from phalanx.errors import CheckpointError, NoHolderError
from phalanx.pipeline import GuardConfig
from phalanx.train.sessions import pipeline as pipeline_session
from phalanx.train.sessions.pipeline import CheckpointRollback

REASON = NoHolderError("stage 1: worker-1 is lost and had no shadow")
DIGESTS = {1: "the state of stage 1"}


class Run:
    """A run at step 7 with a checkpoint of step 4; what its parts are asked to do is written down in order."""

    def __init__(self, guard, checkpoint="checkpoint 4"):
        self.log, self.checkpoint, self.next_step = [], checkpoint, 7
        self.fallback = CheckpointRollback(
            source=None,
            plan=SimpleNamespace(guard=guard),
            savepoint=self,
            saver=self,
            metrics="metrics",
            observe=lambda kind, body: self.log.append((kind, body)),
        )

    def drop_collection(self):
        self.log.append("dropped")

    def open_newest(self):
        self.log.append("opened")
        if isinstance(self.checkpoint, Exception):
            raise self.checkpoint
        return self.checkpoint

    def rewind_run(self, checkpoint, metrics):
        self.log.append(("rewound", checkpoint, metrics))
        return 4

    def fall_back(self, library, step, digests):
        self.log.append(("began", library.checkpoint, step, digests))


@pytest.fixture(autouse=True)
def library(monkeypatch):
    class Library:
        def __init__(self, source, plan, checkpoint):
            self.checkpoint = checkpoint

        def stage_digests(self):
            return DIGESTS

    monkeypatch.setattr(pipeline_session, "StageLibrary", Library)


def test_the_run_begins_anew_with_the_states_of_the_checkpoint_and_counts_what_is_lost():
    run = Run(GuardConfig())

    assert run.fallback.restart_from_checkpoint(run, REASON) == 4
    assert run.log == [
        # what is still being written is of steps that are undone
        "dropped",
        "opened",
        ("rewound", "checkpoint 4", "metrics"),
        ("fell_back", {"from_step": 7, "to_step": 4, "steps_lost": 3, "reason": str(REASON)}),
        ("began", "checkpoint 4", 4, DIGESTS),
    ]


def test_without_a_checkpoint_the_reason_itself_ends_the_run():
    run = Run(GuardConfig(), checkpoint=None)

    with pytest.raises(NoHolderError) as raised:
        run.fallback.restart_from_checkpoint(run, REASON)

    assert raised.value is REASON
    assert run.log == ["dropped", "opened"]


def test_without_a_guard_no_checkpoint_is_known_to_be_right_and_none_is_opened():
    run = Run(GuardConfig(mode="off"))

    with pytest.raises(NoHolderError) as raised:
        run.fallback.restart_from_checkpoint(run, REASON)

    assert raised.value is REASON
    assert run.log == ["dropped"]


def test_a_damaged_checkpoint_is_not_gone_back_to():
    run = Run(GuardConfig(), checkpoint=CheckpointError("checkpoints/step-4: altered"))

    with pytest.raises(CheckpointError, match="altered"):
        run.fallback.restart_from_checkpoint(run, REASON)

    assert run.log == ["dropped", "opened"]
