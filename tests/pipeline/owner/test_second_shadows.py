"""With `guard.shadows` = 2 both other holders of a stage may be lost at once; the second shadow lies no better."""

from copy import copy as shallow
from itertools import permutations

import pytest
import torch

from phalanx.errors import NoHolderError
from phalanx.pipeline import GuardConfig, PipelineConfig, StageCopy
from phalanx.pipeline.protocol.messages import Activation, AuditReport, Bulk, Commit, GradientHeld, UpdateReport
from phalanx.pipeline.verify.state_agreement import _agreed_among
from phalanx.testing import Actor, OutgoingMessage, WorkerCrash, rewrite_only, tampering, tiny_run


def thrice(stages=5, **guard):
    """A run in which three parties have each stage of a worker."""
    rates = {"step_audit_rate": 0.0, "owner_audit_rate": 0.0, "gradient_screen": False, **guard}
    pipeline = PipelineConfig(stages=stages, step_timeout_s=30.0)
    return tiny_run(pipeline=pipeline, guard=GuardConfig(shadows=2, **rates))


def parties_of(company, stage):
    engine = company.engine
    return engine.stage_holders[stage], engine.stage_shadows[stage], engine.second_shadows[stage]


class Death:
    """Two parties that die at one point: the first as it is about to send a message, the other as soon as it next acts.

    Attributes:
        company: The company, once there is one.
    """

    def __init__(self, first, other, is_due, step):
        self.first, self.other, self.is_due, self.step = first, other, is_due, step
        self.company = None

    def actors(self):
        return {self.first: Actor(rewrite=self.die)}

    def die(self, outgoing):
        message = outgoing.message
        # what tells of an update is of the next step
        step = self.step + isinstance(message, UpdateReport)
        if self.company is None or not self.is_due(message) or message.step != step:
            return (outgoing,)
        self.company.kill_worker(f"worker-{self.other}")
        raise WorkerCrash


PLACES = {1: (1, 2, 3), 2: (2, 3, 1), 3: (3, 2, 1)}
"""Holder, shadow and second shadow of each stage of three workers, by number of the worker."""


def test_each_stage_has_three_parties_and_no_bit_is_another(make_company, honest_digest):
    run = thrice()
    company = make_company(run)

    results = company.run(3)

    places = {stage: tuple(f"worker-{n}" for n in numbers) for stage, numbers in PLACES.items()}
    assert {stage: parties_of(company, stage) for stage in (1, 2, 3)} == places
    assert (company.verdicts, company.lost, [result.guard.attempts for result in results]) == ([], [], [1, 1, 1])
    assert company.weights_digest() == honest_digest(tiny_run(5), 3)


POINTS = {
    "forward": lambda m: isinstance(m, Activation) and (m.direction, m.microbatch) == ("forward", 2),
    "backward": lambda m: isinstance(m, Activation) and (m.direction, m.microbatch) == ("backward", 1),
    "gradient": lambda m: isinstance(m, Bulk) and m.purpose == "gradient",
    "commit": lambda m: isinstance(m, Commit),
    "held": lambda m: isinstance(m, GradientHeld),
    "audited": lambda m: isinstance(m, AuditReport),
    "updated": lambda m: isinstance(m, UpdateReport),
}
"""Points of a step: the first message that the first party does not send any more."""

QUICK = {("updated", (1, 2)), ("updated", (2, 1)), ("gradient", (1, 2)), ("held", (2, 3)), ("backward", (1, 3))}


@pytest.mark.parametrize(
    ("point", "pair"),
    [
        pytest.param(point, pair, marks=() if (point, pair) in QUICK else pytest.mark.slow)
        for point in POINTS
        for pair in permutations((1, 2, 3), 2)
        # worker-1 is nobody's auditor
        if (point, pair[0]) != ("audited", 1)
    ],
)
def test_any_two_parties_of_a_stage_lost_at_once_cost_the_step_alone(make_company, honest_digest, point, pair):
    death = Death(*pair, POINTS[point], 1)
    company = death.company = make_company(thrice(), death.actors())

    company.run(3)

    (left,) = {1, 2, 3} - {*pair}
    assert sorted(company.lost) == sorted(f"worker-{number}" for number in pair)
    assert set(company.engine.stage_holders.values()) == {"owner", f"worker-{left}"}
    assert (company.verdicts, company.engine.steps_redone <= 1) == ([], True)
    assert company.weights_digest() == honest_digest(tiny_run(5), 3)


def test_with_one_shadow_the_same_loss_ends_the_run(make_company):
    death = Death(1, 2, POINTS["updated"], 1)
    company = death.company = make_company(tiny_run(5), death.actors())

    with pytest.raises(NoHolderError, match="is lost and had no shadow"):
        company.run(3)


@pytest.mark.parametrize("lag", [0, 1])
def test_two_die_between_steps_and_spares_fill_the_places(make_company, honest_digest, lag):
    pipeline = PipelineConfig(stages=4, spares=3, step_timeout_s=30.0)
    guard = GuardConfig(shadows=2, commit_lag=lag, step_audit_rate=0.0, owner_audit_rate=0.0)
    company = make_company(tiny_run(pipeline=pipeline, guard=guard))
    company.run(2)
    holder, shadow, second = parties_of(company, 1)
    company.kill_worker(holder)
    company.kill_worker(shadow)

    company.run(3)

    assert sorted(company.lost) == sorted((holder, shadow))
    assert company.engine.stage_holders[1] == second
    assert "owner" not in (company.engine.stage_shadows[1], company.engine.second_shadows[1])
    assert company.weights_digest() == honest_digest(tiny_run(4), 5)


# --- liars ------------------------------------------------------------------------------------------

FALSE = "3" * 64


def falsify_state(stage):
    def falsify(outgoing, applied):
        state = applied.states[str(stage)].model_copy(update={"weights": FALSE})
        return [outgoing.with_fields({"states": {**applied.states, str(stage): state}})]

    return Actor(rewrite=rewrite_only(UpdateReport, falsify))


def claim_gradient(stage):
    def claim(outgoing, held):
        return [outgoing.with_fields({"gradient": FALSE, "parts": ()})] if held.stage == stage else [outgoing]

    return Actor(rewrite=rewrite_only(GradientHeld, claim))


def send_other_gradient(receiver):
    def alter(outgoing, message):
        if message.purpose != "gradient" or outgoing.receiver != receiver:
            return [outgoing]
        doubled = (2 * torch.frombuffer(bytearray(outgoing.payload), dtype=torch.float32)).numpy().tobytes()
        return [OutgoingMessage(receiver, message, doubled)]

    return Actor(rewrite=rewrite_only(Bulk, alter))


@pytest.mark.parametrize(
    ("liars", "offence"),
    [
        # worker-3 is the second shadow of stage 1
        ({3: falsify_state(1)}, "state"),
        ({3: claim_gradient(1)}, "gradient"),
        # worker-1 holds stage 1 and tells its second shadow another gradient than it commits to
        ({1: send_other_gradient("worker-3")}, "gradient"),
        ({1: falsify_state(1)}, "state"),
        ({1: Actor(tampering(lambda way, step, m, tensor: -tensor))}, "message"),
    ],
)
def test_a_liar_beside_two_shadows_is_named_alone(make_company, honest_digest, liars, offence):
    company = make_company(thrice(audit_rate=1.0), liars)

    company.run(3)

    digest, (number,) = company.weights_digest(), liars
    assert [(verdict.party, verdict.offence) for verdict in company.verdicts] == [(f"worker-{number}", offence)]
    assert (company.lost, company.event_bodies("verdict_refused")) == ([], [])
    assert digest == honest_digest(tiny_run(5), 3)


@pytest.mark.parametrize("make_liar", [falsify_state, claim_gradient])
def test_two_shadows_that_lie_alike_outvote_no_honest_holder(make_company, honest_digest, make_liar):
    company = make_company(thrice(), {2: make_liar(1), 3: make_liar(1)})

    company.run(3)

    digest = company.weights_digest()
    assert {verdict.party for verdict in company.verdicts} <= {"worker-2", "worker-3"}
    assert company.verdicts
    assert company.engine.stage_holders[1] == "worker-1"
    assert {*company.evicted, *company.lost} == {"worker-2", "worker-3"}
    assert digest == honest_digest(tiny_run(5), 3)


@pytest.mark.parametrize("kind", [GradientHeld, UpdateReport])
def test_a_second_shadow_that_says_nothing_is_replaced_and_not_convicted(make_company, honest_digest, kind):
    def withhold(outgoing, message):
        is_second = isinstance(message, UpdateReport) or message.stage == 1
        return [] if is_second else [outgoing]

    company = make_company(thrice(), {3: Actor(rewrite=rewrite_only(kind, withhold))})

    company.run(2)

    assert company.weights_digest() == honest_digest(tiny_run(5), 2)
    assert (company.lost, company.verdicts) == (["worker-3"], [])


def alter_last_copy(copy, held):
    """Worker 3 alone: its copy of stage 1 takes twice the gradient in step 1, when the other two are about to die."""

    class Altered(StageCopy):
        def apply_update(self, step, gradients, clip_coefficient):
            factor = 2.0 if step == 1 and not is_done.get("done") else 1.0
            is_done["done"] = is_done.get("done") or step == 1
            super().apply_update(step, {name: factor * g for name, g in gradients.items()}, clip_coefficient)

    is_done = {}
    if held or copy.spec.index != 1:
        return copy
    mine = shallow(copy)
    mine.__class__ = Altered
    return mine


@pytest.mark.parametrize("defended", [True, False])
def test_what_the_last_copy_made_alone_is_made_again(make_company, honest_digest, monkeypatch, defended):
    if not defended:
        alone = "phalanx.pipeline.verify.state_agreement._agreed_among"
        # whether worker-2 has signed its state before it dies is left to the threads
        monkeypatch.setattr(alone, lambda signed: signed.get("worker-3"))
    death = Death(1, 2, POINTS["updated"], 1)
    company = death.company = make_company(thrice(), death.actors() | {3: Actor(alter_last_copy)})

    company.run(3)

    is_honest = company.weights_digest() == honest_digest(tiny_run(5), 3)
    assert is_honest == defended
    assert [verdict.party for verdict in company.verdicts] == (["worker-3"] if defended else [])


def alter_first_update(copy, held):
    """A liar whose copy of stage 1 takes twice the gradient in step 1, once: an accomplice has the same wrong state."""

    class Altered(StageCopy):
        def apply_update(self, step, gradients, clip_coefficient):
            factor = 2.0 if step == 1 and not done else 1.0
            done.extend([step] if step == 1 else [])
            super().apply_update(step, {name: factor * g for name, g in gradients.items()}, clip_coefficient)

    done = []
    if copy.spec.index != 1:
        return copy
    mine = shallow(copy)
    mine.__class__ = Altered
    return mine


def test_two_that_lie_alike_outvote_no_third_where_another_party_dies_before_states_are_compared(
    make_company, honest_digest
):
    """States of an update that was interrupted are agreed on when all get ready again: without a count of votes."""
    pipeline = PipelineConfig(stages=4, spares=3, step_timeout_s=30.0)
    guard = GuardConfig(shadows=2, step_audit_rate=0.0, owner_audit_rate=0.0, gradient_screen=False)
    run = tiny_run(pipeline=pipeline, guard=guard)
    company = make_company(run)
    company.run(1)
    holder, shadow, second = parties_of(company, 1)
    victim = company.engine.stage_holders[2]
    assert victim not in (holder, shadow, second)

    def die(outgoing):
        if isinstance(outgoing.message, UpdateReport) and outgoing.message.step == 2:
            raise WorkerCrash
        return (outgoing,)

    def number(name):
        return int(name.rpartition("-")[2])

    def withhold(outgoing):
        # so that nothing is compared before the death
        return () if isinstance(outgoing.message, UpdateReport) and outgoing.message.step == 2 else (outgoing,)

    liars = {number(holder): Actor(alter_first_update), number(shadow): Actor(alter_first_update, rewrite=withhold)}
    company = make_company(run, {**liars, number(victim): Actor(rewrite=die)})

    company.run(3)

    assert {verdict.party for verdict in company.verdicts} <= {holder, shadow}
    assert company.verdicts
    assert second not in (*company.evicted, *company.lost)
    assert company.weights_digest() == honest_digest(tiny_run(4), 3)


@pytest.mark.parametrize("odd", ["worker-1", "worker-2", "worker-3"])
def test_a_state_that_one_of_three_has_signed_otherwise_is_agreed_on_by_no_vote(odd):
    signed = {name: "one" for name in ("worker-1", "worker-2", "worker-3")}

    assert _agreed_among(signed) == "one"
    assert _agreed_among(signed | {odd: "other"}) is None
    assert _agreed_among(signed | {odd: None}) is None
