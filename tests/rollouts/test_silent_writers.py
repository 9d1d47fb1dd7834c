"""An answer counts for the request that it names; a writer that costs more than it brings is left out, unconvicted."""

from collections import Counter

import pytest
from rollout_scene import END, after_a_step
from turn_taking import Pki, Said, TurnTaking

from phalanx.errors import DataError, FrameError
from phalanx.rollouts import (
    PolicyModel,
    Prompt,
    RolloutCheck,
    RolloutRequest,
    RolloutTolerance,
    RolloutWriter,
    SamplerConfig,
    company,
    generate_rollouts,
)
from phalanx.transport import CheckedFrame

ALL = RolloutCheck(rate=1.0)


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def steps(policy):
    """Policy, model, request and honest texts of some steps; every step has weights of its own."""
    found = []
    for step in range(8):
        policy = after_a_step(policy, seed=step)
        request = RolloutRequest(
            step=step,
            policy=policy.full_digest,
            seed=3,
            sampler=SamplerConfig(max_new_tokens=6, sketch_every=4),
            prompts=tuple(Prompt(number=n, ids=(7 + n, 9 + step, 11)) for n in range(3)),
            samples=2,
            ends=(END,),
        )
        model = PolicyModel.from_policy(policy)
        found.append((policy, model, request, generate_rollouts(model, request)))
    return found


def tokens(rollouts):
    return [(one.prompt, one.sample, one.ids) for one in rollouts]


def play(table, steps):
    for policy, model, request, alone in steps:
        assert tokens(table.generate(policy, model, request)) == tokens(alone)


def table_of(home, pki, check=ALL, writer=RolloutWriter, **rewrites):
    names = {name: f"writer-{name[-1]}" for name in rewrites}
    writers = {name: writer() if name == "writer-0" else RolloutWriter() for name in pki.writers}
    return TurnTaking(home, pki, check, writers, {names[name]: one for name, one in rewrites.items()})


@pytest.mark.parametrize("delay", [1, 2, 3])
@pytest.mark.parametrize("kept", [1, 3, 64])
def test_an_honest_answer_that_comes_late_convicts_nobody(delay, kept, steps, pki, tmp_path, monkeypatch):
    monkeypatch.setattr(company, "_MAX_KEPT", kept)

    def slow(step, said):
        if step == 0:
            table.held.append((delay, "writer-0", said))
        return [] if step == 0 else [said]

    table = table_of(tmp_path, pki, w0=slow)
    play(table, steps[:5])

    assert (table.owner.verdicts, table.owner.active_workers) == ([], pki.writers)


def test_an_answer_to_a_request_of_another_worker_counts_for_nobody(steps, pki, tmp_path):
    others = {}

    def note(step, said):
        others[step] = said
        return [said]

    def borrowed(step, said):
        return [others[step - 1] if step else said]

    table = table_of(tmp_path, pki, w1=note, w0=borrowed)
    play(table, steps[:2])

    assert (table.owner.verdicts, dict(table.owner.unanswered_requests)) == ([], {"writer-0": 1})


def test_a_silent_worker_costs_as_many_timeouts_as_the_budget_has_and_one_more(steps, pki, tmp_path):
    check = RolloutCheck(rate=1.0, answer_timeout_s=600.0, max_unanswered=2)
    table = table_of(tmp_path, pki, check, w0=lambda _step, _said: [])
    play(table, steps)

    (dismissal,) = table.owner.dismissals
    assert (dismissal.party, dismissal.step, dismissal.cause) == ("writer-0", 2, "unanswered")
    assert dismissal.reason == (
        "left 3 requests without a usable answer in time and answered 0; the last: it was silent"
    )
    assert table.owner.verdicts == []
    assert table.owner.active_workers == ("writer-1", "writer-2")
    assert 1800.0 <= table.clock.now < 1803.0


class Busy(RolloutWriter):
    def write_answers(self, request):
        raise DataError("no time")


def test_a_worker_that_refuses_every_request_is_left_out_too(steps, pki, tmp_path):
    table = table_of(tmp_path, pki, writer=Busy)
    play(table, steps[:4])

    assert [one.cause for one in table.owner.dismissals] == ["unanswered"]
    assert "the last: no time" in table.owner.dismissals[0].reason
    assert table.clock.now < 1.0


def test_a_worker_answers_no_request_that_would_convict_an_honest_one(steps, pki, tmp_path):
    narrow = RolloutCheck(rate=1.0, tolerance=RolloutTolerance(margin=0.0, logprob=0.0))
    table = table_of(tmp_path, pki, narrow, w0=lambda _step, said: [said])
    play(table, steps[:3])

    assert (table.owner.verdicts, table.owner.active_workers) == ([], ())
    assert "margin, logprob would be judged more narrowly" in table.owner.dismissals[0].reason


def test_a_worker_is_asked_once_for_an_answer(steps, pki, tmp_path):
    table = table_of(tmp_path, pki)
    play(table, steps[:1])
    asked = next(header for name, header in table.sent if (name, header.fields.kind) == ("writer-0", "rollout_request"))
    again = CheckedFrame("owner", "rollout_request", asked.fields.body, memoryview(b""), asked)

    with pytest.raises(FrameError, match="request 0 came after request 0"):
        table.services["writer-0"].handle_frame(again)


def test_an_honest_worker_that_was_silent_once_stays(steps, pki, tmp_path):
    table = table_of(tmp_path, pki, w0=lambda step, said: [] if step == 3 else [said])
    play(table, steps)

    assert (table.owner.dismissals, table.owner.active_workers) == ([], pki.writers)


def test_a_worker_that_sends_without_end_is_left_out(steps, pki, tmp_path):
    table = table_of(tmp_path, pki, w0=lambda _step, said: [said] * 40)
    play(table, steps[:2])

    (dismissal,) = table.owner.dismissals
    assert (dismissal.party, dismissal.cause) == ("writer-0", "frames")
    assert dismissal.reason == "sent 18 frames, was asked 1 times"


def test_a_malformed_frame_has_its_sender_left_out_and_convicts_nobody(steps, pki, tmp_path):
    table = table_of(tmp_path, pki, w0=lambda _step, said: [Said(said.kind, {"surplus": 1})])
    play(table, steps[:1])

    assert (table.owner.verdicts, [one.cause for one in table.owner.dismissals]) == ([], ["frames"])


def test_no_two_requests_of_a_session_have_one_digest(steps, pki, tmp_path):
    table = table_of(tmp_path, pki, w0=lambda _step, _said: [])
    policy, model, request, _ = steps[0]

    for _ in range(2):
        table.generate(policy, model, request)

    digests = Counter(
        RolloutRequest.model_validate(header.fields.body, strict=False).request_digest
        for _, header in table.sent
        if header.fields.kind == RolloutRequest.kind
    )
    assert len(digests) >= 8
    assert set(digests.values()) == {1}


def test_a_reward_that_no_rule_checks_is_not_handed_on(steps, pki, tmp_path):
    def paid(_step, said):
        lines = [line | {"reward": 1.0} for line in said.body["lines"]]
        return [Said(said.kind, said.body | {"lines": lines}, said.payload)]

    table = table_of(tmp_path, pki, w0=paid)
    policy, model, request, _ = steps[0]

    assert {one.reward for one in table.generate(policy, model, request)} == {None}
