"""A worker with an ordinary certificate sends junk without end: it is given up, and no other party pays for it."""

from typing import ClassVar

import pytest

from phalanx.config import canonical_json
from phalanx.pipeline import PipelineConfig
from phalanx.pipeline.assignment.budget import LINE_BYTES, LINES_AT_FIRST, EventSampler, allowance_of
from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.protocol.message import Message
from phalanx.pipeline.protocol.messages import (
    Ask,
    Bulk,
    Carry,
    Commit,
    Fault,
    PassedOnHeader,
    ProgressReport,
    Ready,
    UpdateReport,
)
from phalanx.testing import Actor, OutgoingMessage, rewrite_only, tiny_run

_LINE_OVERHEAD = 600
"""Sequence, time, run, digest and signature of a line of the audit log."""
LONG = "\x1b]0;owned\x07" + "\u202e" + "j" * 900_000
_LEAF_BYTES = 8192
"""Most bytes of a signed report with the headers of its two inputs, which have bounded fields."""


def disk_bytes(plan: StepPlan, num_workers: int) -> int:
    """Most bytes of the logs of one attempt at a step, whatever workers send; evidence of verdicts comes on top.

    | what | lines |
    |---|---|
    | refused messages, and faults reported, of each worker | `LINES_AT_FIRST` and one for each power of two |
    | odd and audited messages | 8 M K |
    | leaves of the step's proof, `_LEAF_BYTES` each | 2 M K + 8 K |
    | verdicts, losses, takeovers, changed roles, words at the door | 16 for each worker |
    | metrics | one line, with one figure for each pair of parties |
    """
    each = allowance_of(plan)
    sampled = sum(LINES_AT_FIRST + bound.bit_length() for bound in (each.refusals, each.messages))
    audits = plan.microbatches * len(plan.stages)
    lines = num_workers * (sampled + 16) + 8 * audits + 1
    leaves = 2 * audits + 8 * len(plan.stages)
    return lines * LINE_BYTES + leaves * _LEAF_BYTES + 256 * (num_workers + 1) ** 2


def flood(message, *, at_step=1, times=4000, payload=b"", receiver="owner"):
    def send(outgoing, commit):
        junk = [OutgoingMessage(receiver, message(outgoing, commit), payload)] * times if commit.step == at_step else []
        return [*junk, outgoing]

    return Actor(rewrite=rewrite_only(Commit, send))


def stray_fault(outgoing, commit):
    return Fault(epoch=commit.epoch, about="worker-2", error="FrameError", reason="j").model_copy(
        update={"reason": LONG}
    )


def stray_ready(outgoing, commit):
    return Ready(epoch=commit.epoch, states={}).model_copy(update={"states": {LONG: None}})


def stray_state(outgoing, commit):
    # well-formed, and refused: a stage that it does not have
    state = {"step": commit.step, "weights": "0" * 64, "moments": "0" * 64}
    body = {"epoch": commit.epoch, "step": commit.step, "states": {"3": state}, "usage": {}, "bytes_sent": {}}
    return UpdateReport.model_validate(body)


def stray_ask(outgoing, commit):
    return Ask(epoch=commit.epoch, step=commit.step)


class UnknownMessage(Message):
    """A message as another release may have one: it cannot be read here, and convicts no party."""

    kind: ClassVar[str] = "unknown"


def unreadable(outgoing, commit):
    return UnknownMessage(epoch=commit.epoch)


def stray_bulk(outgoing, commit):
    return Bulk(epoch=commit.epoch, step=commit.step, stage=2, purpose="gradient", offset=0, total=4)


def stray_standing(outgoing, commit):
    # never refused, and of no use
    return ProgressReport(epoch=commit.epoch, step=commit.step, stages={}, gradients=())


def stray_carry(outgoing, commit):
    return Carry(epoch=0, header=PassedOnHeader(header="{}", signature="00"))


def logged(company):
    return sum(len(canonical_json(body)) + _LINE_OVERHEAD for _, body in company.events)


@pytest.mark.parametrize(
    "message",
    [
        stray_state,
        stray_carry,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (stray_ask, stray_bulk, stray_standing)),
    ],
    ids=lambda one: one.__name__,
)
def test_who_sends_junk_is_given_up_and_the_log_stays_short(make_company, honest_digest, message):
    run = tiny_run()
    company = make_company(run, {1: flood(message)})

    company.run(3)

    assert company.lost == ["worker-1"]
    assert company.verdicts == []
    assert company.weights_digest() == honest_digest(run, 3)
    # three steps, one of them twice
    assert logged(company) < 4 * disk_bytes(company.plan, 2)
    assert len(company.event_bodies("refused")) + len(company.event_bodies("fault")) < 8 * LINES_AT_FIRST


@pytest.mark.parametrize(
    "message", [stray_fault, pytest.param(stray_ready, marks=pytest.mark.slow)], ids=lambda one: one.__name__
)
def test_junk_of_nearly_a_megabyte_a_piece_is_cut_off_before_it_is_written_down(make_company, honest_digest, message):
    run = tiny_run()
    company = make_company(run, {1: flood(message, times=300)})

    company.run(3)

    assert "worker-1" in (*company.lost, *company.evicted)
    assert company.weights_digest() == honest_digest(run, 3)
    assert logged(company) < 4 * disk_bytes(company.plan, 2)
    text = "".join(str(body) for _, body in company.events)
    assert "\x1b" not in text
    assert "\u202e" not in text


@pytest.mark.quick_cases("unreadable")
@pytest.mark.parametrize("message", [stray_ask, unreadable], ids=lambda one: one.__name__)
def test_junk_for_another_worker_makes_that_worker_send_none(make_company, honest_digest, message):
    # each message would have its receiver tell the owner
    told = []

    def count(outgoing, fault):
        told.append(fault.epoch)
        return [outgoing]

    run = tiny_run(pipeline=PipelineConfig(stages=4, spares=1))
    actors = {1: flood(message, receiver="worker-2"), 2: Actor(rewrite=rewrite_only(Fault, count))}
    company = make_company(run, actors)

    company.run(3)

    assert "worker-2" not in (*company.lost, *company.evicted)
    assert {verdict.party for verdict in company.verdicts} <= {"worker-1"}
    assert company.weights_digest() == honest_digest(run, 3)
    assert 0 < len(told) < 2 * LINES_AT_FIRST
    assert len(company.event_bodies("fault")) < 8 * LINES_AT_FIRST


@pytest.mark.parametrize("stages", [4, *(pytest.param(number, marks=pytest.mark.slow) for number in (3, 6))])
def test_an_honest_party_uses_a_small_part_of_what_it_may_send(make_company, stages):
    company = make_company(tiny_run(stages))
    most = {"messages": 0, "bytes": 0, "refusals": 0}
    allowances = company.engine._context.endpoint.allowances
    renew = allowances.renew_all

    def note():
        for key, counter in (
            ("messages", allowances._messages),
            ("bytes", allowances._bytes),
            ("refusals", allowances._refusals),
        ):
            most[key] = max(most[key], *counter.values(), 0)
        renew()

    allowances.renew_all = note
    company.run(4)
    company.save_step()

    each = allowance_of(company.plan)
    assert most["messages"] * 4 < each.messages
    assert most["bytes"] * 4 < each.size_bytes
    assert most["refusals"] == 0


def test_the_first_few_and_then_powers_of_two_are_written_down():
    sample = EventSampler()

    numbers = [sample.number_event("fault", "a") for _ in range(100)]

    assert [number for number in numbers if number] == [*range(1, 17), 32, 64]
    assert sample.number_event("fault", "b") == 1
