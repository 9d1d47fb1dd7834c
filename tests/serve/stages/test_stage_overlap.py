"""Stages work at the same time on groups of texts, by the same bits, and a group whose party leaves is not lost."""

import threading

import pytest
from stage_scene import Scene, texts_of, worker_file

from phalanx.errors import ModelError
from phalanx.serve.stages.groups import cut_groups
from phalanx.serve.stages.worker import StageHolder

PROMPTS = [chr(97 + number) * 70 for number in range(6)]
"""Two pieces each: 64 rows, then 6."""


class Meeting:
    """Both stages go on only when both compute: the first one the second group, the second one the first group."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.has_met = False

    def meet(self) -> None:
        if not self.has_met:
            # a stage that waits for the other in vain breaks the barrier, and the test says so
            self.barrier.wait(60)
            self.has_met = True


class MeetingHolder(StageHolder):
    """Waits for the other stage at its step of this number."""

    def __init__(self, meeting, order):
        super().__init__(worker_file())
        self._meeting, self._order = meeting, order

    def answer_step(self, step, digest, payload):
        if step.order == self._order:
            try:
                self._meeting.meet()
            except threading.BrokenBarrierError as exc:
                raise ModelError("the other stage is idle") from exc
        return super().answer_step(step, digest, payload)


def test_a_stage_computes_one_group_while_the_next_stage_computes_the_one_before(directory, one_process, tmp_path):
    meeting = Meeting()
    holders = {"front-1": MeetingHolder(meeting, 1), "back-1": MeetingHolder(meeting, 0)}
    with Scene(tmp_path, directory, holders, answer_timeout_s=120.0) as scene:
        texts = scene.texts(PROMPTS)
        rechecks = scene.rechecks()

    assert meeting.has_met
    assert texts == texts_of(one_process, PROMPTS)
    assert rechecks == ["yes"] * len(PROMPTS)
    assert (scene.relay.verdicts, scene.relay.departures) == ([], {})
    # the same bits: nothing that was redone differs by a bit
    assert scene.relay.worst_distance == 0.0


class LeavingHolder(StageHolder):
    """Refuses its step of this number, honestly before it."""

    def __init__(self, order):
        super().__init__(worker_file())
        self._order = order

    def answer_step(self, step, digest, payload):
        if step.order == self._order:
            raise ModelError("has no time any more")
        return super().answer_step(step, digest, payload)


class LyingHolder(LeavingHolder):
    """Adds to one number from its step of this number on."""

    def answer_step(self, step, digest, payload):
        self._lies = step.order >= self._order
        return StageHolder.answer_step(self, step, digest, payload)

    def extend_texts(self, pieces, texts, hidden):
        outputs = super().extend_texts(pieces, texts, hidden).clone()
        outputs[0, 0] += float(self._lies)
        return outputs


@pytest.mark.parametrize("order", [0, 1, 2, 5])
@pytest.mark.parametrize("party", ["front-1", "back-1"])
def test_a_party_that_leaves_between_groups_costs_no_token(party, order, directory, one_process, tmp_path):
    with Scene(tmp_path, directory, {party: LeavingHolder(order)}) as scene:
        texts = scene.texts(PROMPTS)
        rechecks = scene.rechecks()

    assert texts == texts_of(one_process, PROMPTS)
    assert scene.relay.departures == {party: "refused"}
    assert rechecks == ["yes"] * len(PROMPTS)
    assert scene.relay.verdicts == []


def test_both_stages_may_lose_a_party_in_one_step(directory, one_process, tmp_path):
    holders = {"front-1": LeavingHolder(2), "back-1": LeavingHolder(1)}
    with Scene(tmp_path, directory, holders) as scene:
        texts = scene.texts(PROMPTS)

    assert texts == texts_of(one_process, PROMPTS)
    assert scene.relay.departures == {"front-1": "refused", "back-1": "refused"}


@pytest.mark.parametrize("party", ["front-1", "back-1"])
def test_a_lie_in_one_group_names_its_party_and_no_other(party, directory, tmp_path):
    with Scene(tmp_path, directory, {party: LyingHolder(1)}) as scene:
        scene.texts(PROMPTS, 2)
        rechecks = scene.rechecks()

    assert "refuted" in rechecks
    assert {verdict.party for verdict in scene.relay.verdicts} == {party}


@pytest.mark.parametrize(
    ("lengths", "num_stages", "groups"),
    [
        ([64], 2, [[64]]),
        ([1] * 31, 2, [[1] * 31]),
        ([1] * 32, 2, [[1] * 16, [1] * 16]),
        ([64, 64, 1], 2, [[64], [64, 1]]),
        ([1, 64, 64, 64, 64], 3, [[1, 64], [64], [64], [64]]),
        ([64] * 8, 1, [[64] * 8]),
        ([64] * 8, 2, [[64] * 2] * 4),
        ([64, *[1] * 8], 2, [[64, *[1] * 8]]),
        ([64, *[1] * 16], 2, [[64], [1] * 16]),
    ],
)
def test_texts_are_cut_into_groups_that_are_worth_a_step(lengths, num_stages, groups):
    assert [lengths[place] for place in cut_groups(lengths, num_stages)] == groups
