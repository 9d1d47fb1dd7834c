"""Reports of audits as they wait to be weighed: asked for, once, and each when all that it needs is there."""

import json

import pytest
import torch
from hand_made import EPOCH, HOLDER, OWNER, SHADOW, STAGE, STEP, make_world, received

from phalanx.errors import FrameError
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.protocol.messages import Audit, ScreenHit
from phalanx.pipeline.verify.audits import BOTH, Audits
from phalanx.pipeline.verify.draw import AuditDraw
from phalanx.pipeline.verify.facts import StepLedger
from phalanx.pipeline.verify.referee import Referee

THIRD = "worker-9"
DRAWN = 70
"""Number of the order for everything that was drawn."""


class Office:
    """Audits of stage 1, all of them asked of its shadow."""

    def __init__(self, model_cache, auditors=(SHADOW,), **guard):
        self.world = make_world(model_cache, **guard)
        self.facts = self.world.facts
        # one stage in other hands is enough, and a worker beside it that can be a third party
        self.facts.assignment = Assignment(self.facts.assignment.holders | {3: THIRD}, {STAGE: SHADOW})
        self.facts.classes = dict.fromkeys((OWNER, HOLDER, SHADOW, THIRD), "one class")
        self.world.whole_step()
        self.ledger = self.facts.ledger
        self.ledger.awaited_audits |= {(STAGE, m, auditor) for m in range(4) for auditor in auditors}
        self.ledger.orders |= {(STAGE, auditor): DRAWN for auditor in auditors}
        self.posted, self.audits_asked = [], []
        referee = Referee(self.facts.plan, self.facts.bits_decide)
        referee.epoch = EPOCH
        draw = AuditDraw(b"k" * 32, b"n" * 32, 1.0)
        self.audits = Audits(self.facts, self._post, referee, draw)

    def _post(self, party, message, payload):
        self.posted.append((party, message.kind))
        if isinstance(message, Audit):
            self.audits_asked.append(message)
            # as the owner's links do with what it has signed
            self.facts.record.add_message(OWNER, message, received(message, OWNER, party).header)

    def report(self, microbatch=0, auditor=SHADOW, **changes):
        """An honest report comes, but for what a test changes."""
        self.audits.add_report(auditor, self.honest_report(microbatch, **changes))

    def honest_report(self, microbatch=0, directions=BOTH, **changes):
        """What an honest auditor reports, but for what a test changes."""
        report = self.world.report(microbatch)
        digests = {direction: report.digests[direction] for direction in directions}
        return report.model_copy(update={"order": DRAWN, "digests": digests, **changes})

    def ask_urgently(self, hit):
        """Have an odd message audited; return the number of the order."""
        self.audits.ask_urgently(hit)
        return self.audits_asked[-1].order

    def weigh(self):
        return self.world.judge_page(self.audits.weigh_reports())


@pytest.fixture
def office(model_cache):
    return Office(model_cache)


def test_an_honest_report_is_taken_into_the_ledger(office):
    office.report()
    assert office.ledger.reports == {}

    assert office.weigh() is None

    assert list(office.ledger.reports) == [(STAGE, 0, SHADOW)]
    assert office.ledger.unreported_audits == [(STAGE, m, SHADOW) for m in (1, 2, 3)]


@pytest.mark.parametrize("changes", [{"microbatch": 9}, {"stage": 2}, {"order": DRAWN + 1}, {"order": 0}])
def test_a_report_that_was_not_asked_for_is_refused(office, changes):
    report = office.honest_report().model_copy(update=changes)

    with pytest.raises(FrameError, match="not asked for"):
        office.audits.add_report(SHADOW, report)


def test_a_report_of_another_party_than_was_asked_is_refused(office):
    with pytest.raises(FrameError, match="not asked for"):
        office.report(auditor=THIRD)


def test_a_report_counts_once_before_and_after_it_is_weighed(office):
    office.report()
    with pytest.raises(FrameError, match="again"):
        office.report()

    office.weigh()

    with pytest.raises(FrameError, match="again"):
        office.report()


def test_before_the_weights_are_agreed_on_a_report_waits(office):
    state = office.facts.agreed_states.pop(STAGE)
    office.report()
    assert office.weigh() is None
    assert office.audits.unweighed_audits == {(STEP, (STAGE, 0, SHADOW))}
    assert office.ledger.reports == {}

    office.facts.agreed_states[STAGE] = state

    assert office.weigh() is None
    assert (office.audits.unweighed_audits, list(office.ledger.reports)) == (set(), [(STAGE, 0, SHADOW)])


def test_a_lie_names_its_author_and_the_other_reports_wait(office):
    office.world.lie(-office.world.truth("forward", 1), "forward", 1)
    for microbatch in (0, 1, 2):
        office.report(microbatch)

    judgement = office.weigh()

    assert (judgement.verdict.party, judgement.verdict.microbatch) == (HOLDER, 1)
    assert list(office.ledger.reports) == [(STAGE, 0, SHADOW)]
    assert office.audits.unweighed_audits == {(STEP, (STAGE, 2, SHADOW))}


def test_another_attempt_forgets_what_was_said_and_found_odd(office):
    office.report()
    office.audits.note_doubt(hit())
    office.audits.ask_urgently(hit())

    office.audits.reset_attempt()

    assert (office.audits.unweighed_audits, office.audits.screened) == (set(), {})
    office.audits.note_doubt(hit())
    office.report()


def test_what_was_said_of_a_step_that_lags_outlives_the_next_attempt(model_cache):
    office = Office(model_cache, commit_lag=1)
    del office.facts.agreed_states[STAGE]
    office.report()
    office.facts.previous, office.facts.ledger = office.ledger, StepLedger(STEP + 1, EPOCH)

    office.audits.reset_attempt()
    assert office.audits.unweighed_audits == {(STEP, (STAGE, 0, SHADOW))}

    # once the audits of that step are done, nothing of it is kept
    office.facts.previous = None
    office.audits.reset_attempt()
    assert office.audits.unweighed_audits == set()


def test_progress_is_what_is_said_for_the_first_time(office):
    seen = [office.audits.progress_counts]
    office.report()
    seen.append(office.audits.progress_counts)
    with pytest.raises(FrameError):
        office.report()
    assert office.audits.progress_counts == seen[-1]
    office.weigh()
    seen.append(office.audits.progress_counts)
    office.audits.note_doubt(hit())
    seen.append(office.audits.progress_counts)

    assert len(set(seen)) == len(seen)


# --- odd messages ----------------------------------------------------------------------------------------------------


def hit(direction="forward", microbatch=0, source=STAGE):
    place = {"epoch": EPOCH, "step": STEP, "microbatch": microbatch, "direction": direction, "source": source}
    return ScreenHit(**place, reason="its norm is odd")


def test_an_odd_message_that_was_honest_goes_to_its_receiver(office):
    order = office.ask_urgently(hit())
    assert office.posted == [(SHADOW, "audit")]

    office.report(order=order, directions=("forward",))
    assert office.weigh() is None

    assert office.posted == [(SHADOW, "audit"), (SHADOW, "release")]
    assert office.audits.screened == {}
    # what was drawn is still to be reported on
    assert office.ledger.reports == {}


def test_an_odd_message_that_is_a_lie_is_not_released(office):
    office.world.lie(-office.world.truth("forward"))
    office.report(order=office.ask_urgently(hit()), directions=("forward",))

    assert office.weigh().verdict.party == HOLDER
    assert (SHADOW, "release") not in office.posted


def test_an_odd_message_whose_input_is_kept_back_is_not_released(office):
    office.world.lie(torch.zeros(office.facts.plan.hidden_shape))
    report = office.honest_report(directions=("forward",), order=office.ask_urgently(hit()))
    # neither end brings the input, and the owner never keeps back what it sent
    for party in (OWNER, HOLDER):
        office.world.tensors[(party, 0, "forward", 0, False)] = None
    office.audits.add_report(SHADOW, report)

    verdict = office.weigh().verdict

    assert (verdict.party, verdict.offence) == (HOLDER, "transfer")
    assert (SHADOW, "release") not in office.posted
    assert list(office.audits.screened) == [(STAGE, "forward", 0)]


def test_an_urgent_report_of_what_was_cleared_meanwhile_changes_nothing(office):
    office.report(order=office.ask_urgently(hit()), directions=("forward",))
    office.audits.screened.clear()

    assert office.weigh() is None
    assert (SHADOW, "release") not in office.posted


def test_an_urgent_report_is_the_auditors_alone_and_of_this_step(office):
    order = office.ask_urgently(hit())

    with pytest.raises(FrameError, match="not asked for"):
        office.report(auditor=THIRD, order=order)
    report = office.honest_report(order=order)
    office.facts.ledger = StepLedger(STEP + 1, EPOCH)
    office.audits.reset_attempt()
    with pytest.raises(FrameError, match="not asked for"):
        office.audits.add_report(SHADOW, report)


# what a second alarm about the same microbatch must not do to an auditor that answers the first one


@pytest.mark.parametrize("first", BOTH)
@pytest.mark.parametrize("heard", [0, 1], ids=["before the report", "after the report"])
def test_an_alarm_about_the_other_direction_changes_nothing_about_the_report_on_the_first(office, first, heard):
    second = "backward" if first == "forward" else "forward"
    order = office.ask_urgently(hit(first))
    asked = office.audits_asked[0].directions
    if heard == 0:
        office.ask_urgently(hit(second))

    office.report(order=order, directions=asked)
    if heard == 1:
        office.ask_urgently(hit(second))

    assert office.weigh() is None
    assert list(office.audits.screened) == [(STAGE, second, 0)]


def test_of_two_alarms_about_one_microbatch_each_is_cleared_by_the_report_on_it(office):
    forward, backward = office.ask_urgently(hit("forward")), office.ask_urgently(hit("backward"))
    assert forward != backward

    office.report(order=backward)
    assert office.weigh() is None
    assert list(office.audits.screened) == [(STAGE, "forward", 0)]

    office.report(order=forward, directions=("forward",))
    assert office.weigh() is None
    assert office.audits.screened == {}


@pytest.mark.parametrize(
    ("direction", "reported"),
    [("forward", BOTH), ("forward", ()), ("backward", ("forward",)), ("backward", ("backward",))],
)
def test_an_urgent_report_is_weighed_against_the_order_that_it_names(office, direction, reported):
    order = office.ask_urgently(hit(direction))
    # another order, which asks for exactly what is reported, does not count
    office.ask_urgently(hit("backward" if direction == "forward" else "forward"))

    office.report(order=order, directions=reported)
    judgement = office.weigh()

    assert (judgement.verdict.party, judgement.verdict.offence) == (SHADOW, "forgery")
    assert json.loads(judgement.headers["order"].header)["body"]["order"] == order


def test_a_drawn_report_does_not_answer_an_urgent_order_nor_the_other_way_round(office):
    order = office.ask_urgently(hit())

    office.report()
    assert office.weigh() is None
    assert list(office.audits.screened) == [(STAGE, "forward", 0)]

    office.report(order=order, directions=("forward",))
    assert office.weigh() is None
    assert list(office.ledger.reports) == [(STAGE, 0, SHADOW)]


def test_an_order_of_an_attempt_that_is_over_is_answered_no_more(office):
    order = office.ask_urgently(hit())
    office.audits.reset_attempt()

    with pytest.raises(FrameError, match="not asked for"):
        office.report(order=order, directions=("forward",))


def test_a_doubt_about_the_gradient_has_the_step_recomputed(model_cache):
    office = Office(model_cache, gradient_screen=True)
    for microbatch in range(4):
        office.report(microbatch, **({"doubt": "size"} if microbatch == 3 else {}))

    office.weigh()

    assert office.posted == [(SHADOW, "audit")]
    assert office.ledger.awaited_step_audits == {(STAGE, SHADOW)}
