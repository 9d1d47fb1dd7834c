"""Reports of audits as they wait to be weighed: asked for, once, and each when all that it needs is there."""

import pytest
import torch
from hand_made import EPOCH, HOLDER, OWNER, SHADOW, STAGE, STEP, make_world

from phalanx.errors import FrameError
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.protocol.messages import ScreenHit
from phalanx.pipeline.verify.audits import Audits
from phalanx.pipeline.verify.draw import AuditDraw
from phalanx.pipeline.verify.facts import StepLedger
from phalanx.pipeline.verify.referee import Referee

THIRD = "worker-9"


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
        self.posted = []
        referee = Referee(self.facts.plan, self.facts.bits_decide)
        referee.epoch = EPOCH
        draw = AuditDraw(b"k" * 32, b"n" * 32, 1.0)
        self.audits = Audits(self.facts, self._post, referee, draw)

    def _post(self, party, message, payload):
        self.posted.append((party, message.kind))

    def report(self, microbatch=0, auditor=SHADOW, **changes):
        """An honest report comes, but for what a test changes."""
        self.audits.add(auditor, self.world.report(microbatch).model_copy(update=changes))

    def weigh(self):
        return self.world.judge(self.audits.weigh())


@pytest.fixture
def office(model_cache):
    return Office(model_cache)


def test_an_honest_report_is_taken_into_the_ledger(office):
    office.report()
    assert office.ledger.reports == {}

    assert office.weigh() is None

    assert list(office.ledger.reports) == [(STAGE, 0, SHADOW)]
    assert office.ledger.unreported == [(STAGE, m, SHADOW) for m in (1, 2, 3)]


@pytest.mark.parametrize("changes", [{"microbatch": 9}, {"stage": 2}, {"urgent": True}])
def test_a_report_that_was_not_asked_for_is_refused(office, changes):
    report = office.world.report().model_copy(update=changes)

    with pytest.raises(FrameError, match="not asked for, or again"):
        office.audits.add(SHADOW, report)


def test_a_report_of_another_party_than_was_asked_is_refused(office):
    with pytest.raises(FrameError, match="not asked for, or again"):
        office.report(auditor=THIRD)


def test_a_report_counts_once_before_and_after_it_is_weighed(office):
    office.report()
    with pytest.raises(FrameError, match="or again"):
        office.report()

    office.weigh()

    with pytest.raises(FrameError, match="or again"):
        office.report()


def test_before_the_weights_are_agreed_on_a_report_waits(office):
    state = office.facts.agreed.pop(STAGE)
    office.report()
    assert office.weigh() is None
    assert office.audits.said == {(STEP, (STAGE, 0, SHADOW))}
    assert office.ledger.reports == {}

    office.facts.agreed[STAGE] = state

    assert office.weigh() is None
    assert (office.audits.said, list(office.ledger.reports)) == (set(), [(STAGE, 0, SHADOW)])


def test_a_lie_names_its_author_and_the_other_reports_wait(office):
    office.world.lie(-office.world.truth("forward", 1), "forward", 1)
    for microbatch in (0, 1, 2):
        office.report(microbatch)

    judgement = office.weigh()

    assert (judgement.verdict.party, judgement.verdict.microbatch) == (HOLDER, 1)
    assert list(office.ledger.reports) == [(STAGE, 0, SHADOW)]
    assert office.audits.said == {(STEP, (STAGE, 2, SHADOW))}


def test_another_attempt_forgets_what_was_said_and_found_odd(office):
    office.report()
    office.audits.doubt(hit())
    office.audits.ask_urgently(hit())

    office.audits.reset()

    assert (office.audits.said, office.audits.screened) == (set(), {})
    office.audits.doubt(hit())
    office.report()


def test_what_was_said_of_a_step_that_lags_outlives_the_next_attempt(model_cache):
    office = Office(model_cache, commit_lag=1)
    del office.facts.agreed[STAGE]
    office.report()
    office.facts.previous, office.facts.ledger = office.ledger, StepLedger(STEP + 1, EPOCH)

    office.audits.reset()
    assert office.audits.said == {(STEP, (STAGE, 0, SHADOW))}

    # once the audits of that step are done, nothing of it is kept
    office.facts.previous = None
    office.audits.reset()
    assert office.audits.said == set()


def test_progress_is_what_is_said_for_the_first_time(office):
    seen = [office.audits.progress]
    office.report()
    seen.append(office.audits.progress)
    with pytest.raises(FrameError):
        office.report()
    assert office.audits.progress == seen[-1]
    office.weigh()
    seen.append(office.audits.progress)
    office.audits.doubt(hit())
    seen.append(office.audits.progress)

    assert len(set(seen)) == len(seen)


# --- third parties ---------------------------------------------------------------------------------------------------


@pytest.fixture
def league(model_cache):
    """A third party audits the stage beside its shadow."""
    return Office(model_cache, (SHADOW, THIRD))


def test_a_third_party_is_heard_when_the_shadow_has_spoken(league):
    league.report(auditor=THIRD)
    league.weigh()
    assert league.ledger.reports == {}

    for microbatch in range(4):
        league.report(microbatch)
    for microbatch in (1, 2, 3):
        league.report(microbatch, auditor=THIRD)
    league.weigh()

    assert league.ledger.unreported == []


def test_a_third_party_finds_a_stage_and_the_shadow_that_vouches_for_it(league):
    league.world.lie(-league.world.truth("forward", 2), "forward", 2)
    said = {d: league.ledger.messages[(STAGE, d, 2)].digest for d in ("forward", "backward")}
    for microbatch in range(4):
        league.report(microbatch, **({"digests": said} if microbatch == 2 else {}))
        league.world.tensors[(THIRD, STAGE, "forward", microbatch, True)] = league.world.honest("forward", microbatch)
        league.report(microbatch, auditor=THIRD)
    league.world.bulks[(THIRD, "weights")] = league.world.bulks[(SHADOW, "weights")]

    judgement = league.weigh()

    assert (judgement.verdict.party, judgement.verdict.accuser) == (HOLDER, THIRD)
    assert [(found.verdict.party, found.verdict.offence) for found in league.facts.proved] == [(SHADOW, "collusion")]


def test_of_several_reports_those_on_what_the_shadow_vouched_for_come_first(model_cache):
    # every microbatch is a lie, and the shadow has vouched for the one that was drawn for it
    league = Office(model_cache, (THIRD,))
    league.ledger.awaited_audits.add((STAGE, 2, SHADOW))
    league.world.bulks[(THIRD, "weights")] = league.world.bulks[(SHADOW, "weights")]
    for microbatch in range(4):
        league.world.lie(-league.world.truth("forward", microbatch), "forward", microbatch)
        league.report(microbatch, auditor=THIRD)
        league.world.tensors[(THIRD, STAGE, "forward", microbatch, True)] = league.world.honest("forward", microbatch)
    # its report is the last to come, and is weighed together with the others
    league.report(2, digests={d: league.ledger.messages[(STAGE, d, 2)].digest for d in ("forward", "backward")})

    judgement = league.weigh()

    assert (judgement.verdict.party, judgement.verdict.microbatch) == (HOLDER, 2)
    assert [(found.verdict.party, found.verdict.offence) for found in league.facts.proved] == [(SHADOW, "collusion")]


# --- odd messages ----------------------------------------------------------------------------------------------------


def hit(direction="forward", microbatch=0, source=STAGE):
    place = {"epoch": EPOCH, "step": STEP, "microbatch": microbatch, "direction": direction, "source": source}
    return ScreenHit(**place, reason="its norm is odd")


def test_an_odd_message_that_was_honest_goes_to_its_receiver(office):
    office.audits.ask_urgently(hit())
    assert office.posted == [(SHADOW, "audit")]
    digests = {"forward": office.world.report().digests["forward"]}

    office.report(urgent=True, digests=digests)
    assert office.weigh() is None

    assert office.posted == [(SHADOW, "audit"), (SHADOW, "release")]
    assert office.audits.screened == {}
    # what was drawn is still to be reported on
    assert office.ledger.reports == {}


def test_an_odd_message_that_is_a_lie_is_not_released(office):
    office.world.lie(-office.world.truth("forward"))
    office.audits.ask_urgently(hit())
    office.report(urgent=True, digests={"forward": office.world.report().digests["forward"]})

    assert office.weigh().verdict.party == HOLDER
    assert (SHADOW, "release") not in office.posted


def test_an_odd_message_that_could_not_be_judged_is_not_released(office):
    office.world.lie(torch.zeros(office.facts.plan.hidden_shape))
    office.audits.ask_urgently(hit())
    report = office.world.report()
    office.audits.add(
        SHADOW, report.model_copy(update={"urgent": True, "digests": {"forward": report.digests["forward"]}})
    )
    # neither end shows the input, so that nobody has signed for it
    for party in (OWNER, HOLDER):
        office.world.tensors[(party, 0, "forward", 0, False)] = None

    assert office.weigh() is None

    assert (SHADOW, "release") not in office.posted
    assert list(office.audits.screened) == [(STAGE, 0)]


def test_an_urgent_report_of_what_was_cleared_meanwhile_changes_nothing(office):
    office.audits.ask_urgently(hit())
    office.report(urgent=True, digests={"forward": office.world.report().digests["forward"]})
    office.audits.screened.clear()

    assert office.weigh() is None
    assert (SHADOW, "release") not in office.posted


def test_an_urgent_report_is_the_auditors_alone_and_of_this_step(office):
    office.audits.ask_urgently(hit())

    with pytest.raises(FrameError, match="not asked for"):
        office.report(auditor=THIRD, urgent=True)
    report = office.world.report().model_copy(update={"urgent": True})
    office.facts.ledger = StepLedger(STEP + 1, EPOCH)
    with pytest.raises(FrameError, match="not asked for"):
        office.audits.add(SHADOW, report)


def test_where_the_auditor_must_fetch_weights_the_odd_message_waits_until_they_are_agreed_on(model_cache):
    office = Office(model_cache, shadow="snapshot")
    state = office.facts.agreed.pop(STAGE)
    office.audits.ask_urgently(hit())
    office.weigh()
    assert office.posted == []

    office.facts.agreed[STAGE] = state
    office.weigh()

    assert office.posted == [(SHADOW, "audit")]
    office.weigh()
    assert office.posted == [(SHADOW, "audit")]


def test_a_doubt_about_the_gradient_has_the_step_recomputed(model_cache):
    office = Office(model_cache, gradient_screen=True)
    for microbatch in range(4):
        office.report(microbatch, **({"doubt": "size"} if microbatch == 3 else {}))

    office.weigh()

    assert office.posted == [(SHADOW, "audit")]
    assert office.ledger.awaited_step_audits == {(STAGE, SHADOW)}
