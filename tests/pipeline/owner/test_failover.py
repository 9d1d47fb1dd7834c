"""The failover by itself: which party leaves, for good or not, what the others get, and from which step on."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hand_made import EPOCH, IDENTITIES, OWNER, make_world, received, run_task, standing

from phalanx.engine import StepInputs
from phalanx.errors import ConfigError, NoHolderError, PeerLostError, PeerRefusedError, VerificationError
from phalanx.pipeline.assignment.assignment import roles_of
from phalanx.pipeline.assignment.rebalance import PaceMeter
from phalanx.pipeline.membership.admission import Admission
from phalanx.pipeline.membership.members import Files, Incarnations, Members
from phalanx.pipeline.owner.context import OwnerContext
from phalanx.pipeline.owner.coordinator import Coordinator
from phalanx.pipeline.owner.failover import Failover
from phalanx.pipeline.owner.rollback import PastStep
from phalanx.pipeline.owner.roster import Roster
from phalanx.pipeline.processes.own_memory import ALONE
from phalanx.pipeline.protocol.carried_frames import CarriedFrames
from phalanx.pipeline.protocol.messages import Assign, Ready, Shutdown, StateDigest
from phalanx.pipeline.protocol.needs import LoopTurn, ProgressNeed
from phalanx.pipeline.protocol.requests import Patience
from phalanx.pipeline.verify.draw import AuditDraw
from phalanx.security.crypto import Identity, Revocation
from phalanx.transport import LinkFault

WORKERS = ("worker-1", "worker-2", "worker-3")
TIMEOUT_S = 300.0
NO_ROWS = StepInputs(ids=(), labels=(), num_targets=0)
"""A batch without a row."""
for _name in (*WORKERS, "worker-4"):
    IDENTITIES.setdefault(_name, Identity.without_certificate(_name))


def state_of(stage, letter="a"):
    return StateDigest(step=0, weights=letter * 63 + str(stage), moments=letter * 64)


KNOWN = {stage: state_of(stage) for stage in range(4)}


class Clock:
    """A clock that leaps while no party works."""

    def __init__(self):
        self.seconds = 0.0

    def awake_seconds(self):
        return self.seconds

    wall_seconds = awake_seconds


class Endpoint:
    """The owner's end of its links, as far as a failover uses it."""

    def __init__(self):
        self.known_peers = {name: identity.public for name, identity in IDENTITIES.items()}
        self.refused = []

    def add_peer(self, peer):
        self.known_peers[peer.name] = peer

    def evict_party(self, party):
        self.refused.append(party)


class Judge:
    """Stands for `Verdicts`: evidence holds, or it does not, as a test says."""

    def __init__(self, *, holds=True, doubtful=None):
        self.holds, self.doubtful, self.asked = holds, doubtful, []

    def confirm_judgement(self, judgement, silent=()):
        self.asked.append(judgement.verdict.party)
        return judgement.verdict if self.holds else None

    def party_to_replace(self, judgement, silent=()):
        return self.doubtful


class Run:
    """A failover with three workers that take every role at once, in the state that the owner knows of each stage.

    Attributes:
        mute: Parties that never get ready.
        hanging: Parties that do not answer either when they are asked how far they are.
        lies: Other states than the known ones, by (party, stage).
        told: What was posted, as (party, message).
    """

    def __init__(self, model_cache, workers=WORKERS, **guard):
        world = make_world(model_cache, **guard)
        self.facts, self.events = world.facts, world.events
        self.facts.classes = dict.fromkeys((OWNER, *WORKERS, "worker-4"), OWNER)
        self.library, self.hosted = None, {}
        self.mute, self.hanging, self.lies, self.told = set(), set(), {}, []
        self.dead, self.dismissed, self.replaced, self.owed, self.looked_after = set(), [], [], set(), 0
        self.clock, self.endpoint = Clock(), Endpoint()
        every = (*WORKERS, "worker-4")
        certificates = dict.fromkeys(every, "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n")
        self.members = Members(
            list(workers),
            Admission(world.plan),
            addresses={name: f"{name}:1" for name in every},
            certificates=certificates,
            is_alive=lambda name: name not in self.dead,
            dismiss=self.dismissed.append,
            replace=self.replaced.append,
            look_after=self.look_after,
        )
        self.incarnations = Incarnations(self.endpoint, workers, returns=1)
        self.facts.ledger.epoch = -1
        self.files = Files(None, None, lambda kind, body: self.events.append((kind, body)))
        self.coordinator = Coordinator(self.facts, AuditDraw(b"k" * 32, b"n" * 32, 1.0), CarriedFrames())
        self.verdicts = Judge()
        self.context = OwnerContext(
            facts=self.facts,
            party=SimpleNamespace(roles=self),
            members=self.members,
            files=self.files,
            endpoint=self.endpoint,
            mail=self,
            requests=None,
            patience=Patience(10.0, self.clock),
            incarnations=self.incarnations,
            coordinator=self.coordinator,
            verdicts=self.verdicts,
            notes=None,
            duplicates=None,
            timer=None,
            step_timeout_s=TIMEOUT_S,
        )
        self.roster = Roster(self.context)
        self.failover = Failover(self.context, self.roster)

    def take_at_most(self, seconds):
        """Let taking roles take so long, in what follows."""
        self.failover._context = replace(self.context, step_timeout_s=seconds)

    # --- what stands for the mailbox, the owner's roles and the process table

    def renew_allowances(self):
        self.told.clear()

    def post_message(self, name, message, payload):
        self.told.append((name, message))

    def use_kept_library(self, library):
        pass

    def parties_awaited(self):
        return self.owed

    def look_after(self):
        self.looked_after += 1

    # --- the loop

    def answer(self, need):
        if isinstance(need, ProgressNeed):
            return {name: standing() for name in need.parties if name not in self.hanging}
        assert isinstance(need, LoopTurn)
        self.clock.seconds += 1.0
        for name, message in list(self.told):
            if isinstance(message, Assign) and name not in self.mute | self.coordinator.ready.keys():
                self.get_ready(name, message)
        return None

    def get_ready(self, name, assign):
        stages = [role.stage for role in assign.roles if name in (role.holder, role.shadow, role.second_shadow)]
        states = {str(stage): self.lies.get((name, stage), KNOWN[stage]) for stage in stages}
        ready = Ready(epoch=assign.epoch, states={stage: state for stage, state in states.items() if state is not None})
        self.coordinator.record_message(received(ready, name))

    def do(self, task):
        return run_task(task, self.answer)

    def begun(self, step=0):
        self.do(self.failover.assign_first_roles(step, KNOWN))
        self.events.clear()
        return self

    def judgement(self, party="worker-1", stage=1, accuser="worker-2", offence="message"):
        return self.facts.make_judgement(offence, party, stage, "made up", accuser=accuser)

    # --- what came of it

    @property
    def holders(self):
        return self.facts.assignment.holders

    @property
    def kinds(self):
        return [kind for kind, _ in self.events if not kind.startswith("guarantee")]

    def bodies(self, kind):
        return [body for found, body in self.events if found == kind]

    @property
    def assigned(self):
        return {name: message for name, message in self.told if isinstance(message, Assign)}


@pytest.fixture
def run(model_cache):
    return Run(model_cache)


@pytest.fixture
def begun(run):
    return run.begun()


# --- the start -------------------------------------------------------------------------------------------------------


def test_at_the_start_every_party_is_told_the_same_roles_and_the_known_states_are_agreed_on(run):
    run.do(run.failover.assign_first_roles(3, KNOWN))

    assert run.assigned.keys() == {*WORKERS, OWNER}
    assert len(set(map(id, run.assigned.values()))) == 1
    assign = run.assigned[OWNER]
    assert (assign.epoch, assign.step, {role.source for role in assign.roles}) == (0, 3, {OWNER})
    assert run.facts.agreed_states == {stage: KNOWN[stage] for stage in (1, 2)}
    assert (run.roster.alive, run.verdicts.asked, run.endpoint.refused) == (list(WORKERS), [], [])


@pytest.mark.parametrize("state", [None, state_of(1, "b"), state_of(1).model_copy(update={"step": 1})])
def test_a_worker_that_begins_with_another_state_than_the_known_one_is_left_out_without_a_verdict(run, state):
    run.lies["worker-1", 1] = state

    run.do(run.failover.assign_first_roles(0, KNOWN))

    assert (run.endpoint.refused, run.facts.ledger.epoch, run.roster.alive) == (
        ["worker-1"],
        1,
        ["worker-2", "worker-3"],
    )
    assert "worker-1" not in {*run.holders.values(), *run.assigned}
    (lost,) = run.bodies("lost")
    assert (lost["party"], run.bodies("evicted"), run.verdicts.asked) == ("worker-1", [], [])


def test_a_party_that_could_not_be_reached_before_the_start_gets_no_role(run):
    run.members.unreachable = [LinkFault("worker-2", PeerLostError("no route"))]

    run.do(run.failover.assign_first_roles(0, KNOWN))

    assert (run.bodies("link_broken"), run.facts.ledger.epoch) == ([{"party": "worker-2", "reason": "no route"}], 0)
    assert run.assigned.keys() == {"worker-1", "worker-3", OWNER}


def test_when_no_worker_gets_ready_the_error_says_why_each_is_gone(run):
    run.mute = set(WORKERS)
    run.take_at_most(5.0)

    with pytest.raises(PeerLostError, match=r"every worker was lost.*worker-1: did not start.*worker-3: did not start"):
        run.do(run.failover.assign_first_roles(0, KNOWN))
    assert run.endpoint.refused == list(WORKERS)


def test_an_owner_that_is_late_itself_blames_no_worker(run):
    run.mute = {OWNER}
    run.take_at_most(5.0)

    with pytest.raises(PeerLostError, match="owner was not ready within 5 s"):
        run.do(run.failover.assign_first_roles(0, KNOWN))
    assert (run.roster.alive, run.kinds) == (list(WORKERS), [])


def test_an_owner_that_waits_for_a_workers_state_suspects_that_worker(run):
    run.mute = {OWNER}
    run.take_at_most(5.0)
    run.owed = {"worker-2"}
    run.members.replace = lambda name: run.mute.clear()

    run.do(run.failover.assign_first_roles(0, KNOWN))

    assert run.roster.reasons == {"worker-2": "did not start its roles within 5 s"}


def test_an_owner_without_workers_begins_alone(model_cache):
    run = Run(model_cache, workers=())

    run.do(run.failover.assign_first_roles(0, KNOWN))

    assert set(run.holders.values()) == {OWNER}


def test_an_owner_with_another_state_than_the_known_one_ends_the_run(run):
    run.members.names = run.roster.alive = ["worker-1"]
    run.lies |= {(OWNER, stage): state_of(stage, "b") for stage in range(4)}

    with pytest.raises(VerificationError, match="a state other than the agreed one"):
        run.do(run.failover.assign_first_roles(0, KNOWN))
    assert run.roster.alive == ["worker-1"]


def test_a_ready_of_an_earlier_epoch_does_not_count(run):
    run.mute = {"worker-1"}
    run.take_at_most(5.0)
    honest = run.answer

    def stale(need):
        run.coordinator.record_message(received(Ready(epoch=EPOCH + 7, states={}), "worker-1"))
        return honest(need)

    run_task(run.failover.assign_first_roles(0, KNOWN), stale)

    assert run.roster.reasons == {"worker-1": "did not start its roles within 5 s"}


# --- suspicion -------------------------------------------------------------------------------------------------------


def test_a_party_is_suspected_once_and_one_that_takes_no_part_never(begun):
    for name in ("worker-1", "worker-1", "worker-4", OWNER):
        begun.roster.suspect(name, "its link broke")

    assert (list(begun.roster.lost), begun.kinds) == (["worker-1"], ["link_broken"])


def test_every_worker_with_an_ended_process_is_suspected(begun):
    begun.dead = {"worker-3", "worker-4"}

    begun.roster.suspect_the_dead()

    assert (list(begun.roster.lost), begun.looked_after) == (["worker-3"], 1)


def test_a_probe_goes_to_every_worker_and_names_the_present_attempt(begun):
    begun.told.clear()

    begun.roster.probe()

    assert [name for name, _ in begun.told] == list(WORKERS)
    assert {(message.epoch, message.step) for _, message in begun.told} == {(0, 0)}


# --- a loss ----------------------------------------------------------------------------------------------------------


def test_after_a_loss_the_shadow_serves_the_stage_and_the_step_is_done_again(begun):
    shadow = begun.facts.assignment.shadows[1]
    begun.roster.suspect("worker-1", "silent")
    begun.events.clear()

    begun.do(begun.failover.recover_roles(None, 0))

    assert begun.kinds == ["lost", "takeover", "step_redone"]
    assert begun.bodies("lost") == [{"party": "worker-1", "stages": [1], "step": 0}]
    assert begun.bodies("takeover") == [{"stage": 1, "step": 0, "by": shadow, "from": "worker-1"}]
    assert (begun.holders[1], len(begun.bodies("takeover")), begun.facts.ledger.epoch) == (shadow, 1, 1)
    assert (begun.dismissed, begun.replaced, begun.files.gone) == (["worker-1"],) * 3
    assert not begun.roster.lost


def test_a_party_that_was_lost_may_come_back_as_another_incarnation(begun):
    begun.roster.suspect("worker-1", "silent")
    begun.do(begun.failover.recover_roles(None, 0))

    assert begun.incarnations.name_incarnation("worker-1", begins=True) not in (None, "worker-1")


def test_a_party_is_refused_before_roles_are_given_out_and_not_before_the_new_ones_are_known(begun):
    order = []
    place, tell = begun.failover.placement.assign_without, begun.post_message
    begun.failover.placement.assign_without = lambda *about: order.append("placed") or place(*about)
    begun.endpoint.evict_party = lambda name: order.append("refused")
    begun.post_message = lambda *about: order.append("told") or tell(*about)
    begun.roster.suspect("worker-1", "silent")

    begun.do(begun.failover.recover_roles(None, 0))

    assert order[:3] == ["placed", "refused", "told"]


def test_a_party_that_no_other_can_follow_is_still_shut_out(model_cache):
    begun = Run(model_cache, mode="off").begun()
    begun.roster.suspect("worker-1", "silent")

    with pytest.raises(NoHolderError, match="stage 1: worker-1 is lost and had no shadow"):
        begun.do(begun.failover.recover_roles(None, 0))
    assert (begun.endpoint.refused, begun.roster.alive) == (["worker-1"], ["worker-2", "worker-3"])
    assert begun.bodies("takeover") == []


def test_several_losses_are_seen_to_one_after_the_other_before_the_step_goes_on(begun):
    begun.roster.suspect("worker-3", "silent")
    begun.roster.suspect("worker-2", "silent")

    begun.do(begun.failover.recover_roles(None, 0))

    assert [body["party"] for body in begun.bodies("lost")] == ["worker-3", "worker-2"]
    assert {*begun.holders.values(), *begun.facts.assignment.shadows.values()} == {OWNER, "worker-1"}


def test_a_worker_that_does_not_take_its_new_roles_is_lost_as_well(begun):
    begun.mute = {"worker-3"}
    begun.take_at_most(5.0)
    begun.hanging = {"worker-3"}
    begun.roster.suspect("worker-2", "silent")

    begun.do(begun.failover.recover_roles(None, 0))

    assert begun.roster.alive == ["worker-1"]
    assert begun.bodies("takeover")


def test_one_that_hangs_while_roles_change_is_found_long_before_the_time_is_over(begun):
    begun.mute = begun.hanging = {"worker-3"}
    begun.roster.suspect("worker-2", "silent")

    begun.do(begun.failover.recover_roles(None, 0))

    assert begun.roster.reasons["worker-3"] == "silent while roles were assigned"
    assert begun.clock.seconds < TIMEOUT_S / 2


def test_one_that_answers_while_it_takes_a_state_is_given_the_whole_time(begun):
    begun.mute = {"worker-1"}
    begun.roster.suspect("worker-2", "silent")

    begun.do(begun.failover.recover_roles(None, 0))

    assert begun.clock.seconds > TIMEOUT_S
    assert "silent while" not in begun.roster.reasons.get("worker-1", "")


def test_in_the_very_first_epoch_a_long_silence_is_none(run):
    run.mute = run.hanging = {"worker-1"}
    run.take_at_most(100.0)

    run.do(run.failover.assign_first_roles(0, KNOWN))

    assert run.roster.reasons == {"worker-1": "did not start its roles within 100 s"}


def test_where_a_newcomer_lacks_its_state_the_owner_shadows_the_stage_and_sees_for_itself(begun):
    # the successor of worker-2 needs stage 2 from another worker, and does not get ready
    old = begun.facts.assignment
    newcomer = next(
        role.newcomers[0] for role in _roles_after(begun, "worker-3") if role.newcomers and role.source != OWNER
    )
    begun.mute = {newcomer}
    begun.take_at_most(5.0)
    honest = begun.answer

    def until_the_owner_shadows(need):
        if OWNER in begun.facts.assignment.shadows.values():
            begun.mute.clear()
        return honest(need)

    begun.roster.suspect("worker-3", "silent")
    run_task(begun.failover.recover_roles(None, 0), until_the_owner_shadows)

    assert OWNER in begun.facts.assignment.shadows.values()
    assert (begun.roster.alive, begun.endpoint.refused) == (["worker-1", "worker-2"], ["worker-3"])
    assert begun.holders == old.holders


def _roles_after(run, gone):
    """The roles that would follow a loss; nothing is changed."""
    old = run.facts.assignment
    staying = [name for name in run.roster.alive if name != gone]
    return roles_of(run.failover.placement.assign_without(old, gone, staying), old, {*staying, OWNER})


# --- verdicts --------------------------------------------------------------------------------------------------------


def test_a_convicted_party_leaves_for_good(begun):
    begun.do(begun.failover.recover_roles(begun.judgement(), 0))

    assert begun.kinds == ["evicted", "takeover", "step_redone"]
    assert begun.verdicts.asked == ["worker-1"]
    with pytest.raises(PeerRefusedError, match="may not come back"):
        begun.incarnations.name_incarnation("worker-1", begins=True)


def test_what_the_evidence_does_not_bear_out_moves_nothing(begun):
    begun.verdicts.holds = False
    before = begun.facts.assignment

    begun.do(begun.failover.recover_roles(begun.judgement(), 0))

    assert (begun.facts.assignment, begun.facts.ledger.epoch) == (before, 1)
    assert (begun.roster.alive, begun.kinds) == (list(WORKERS), [])


def test_a_doubtful_accuser_is_replaced_without_blame(begun):
    begun.verdicts.holds, begun.verdicts.doubtful = False, ("worker-2", "its word did not hold")

    begun.do(begun.failover.recover_roles(begun.judgement(), 0))

    assert (begun.bodies("evicted"), [body["party"] for body in begun.bodies("lost")]) == ([], ["worker-2"])
    assert begun.incarnations.name_incarnation("worker-2", begins=True)


@pytest.mark.parametrize("stranger", ["worker-4", OWNER])
def test_a_doubtful_party_that_takes_no_part_is_not_replaced(begun, stranger):
    begun.verdicts.holds, begun.verdicts.doubtful = False, (stranger, "its word did not hold")

    begun.do(begun.failover.recover_roles(begun.judgement(), 0))

    assert (begun.roster.alive, begun.kinds, begun.facts.ledger.epoch) == (list(WORKERS), [], 1)


@pytest.mark.parametrize("had_it", [True, False], ids=["kept copy", "newcomer"])
def test_of_altered_states_after_a_change_of_roles_only_that_of_a_party_that_had_it_convicts(begun, had_it):
    roles = _roles_after(begun, "worker-3")
    role = next(role for role in roles if role.newcomers and OWNER not in role.newcomers)
    party = role.holder if had_it else role.newcomers[0]
    begun.lies[party, role.stage] = state_of(role.stage, "b")
    begun.roster.suspect("worker-3", "silent")

    begun.do(begun.failover.recover_roles(None, 0))

    assert begun.verdicts.asked == ([party] if had_it else [])
    assert begun.roster.alive == [name for name in ("worker-1", "worker-2") if name != party or not had_it]
    # a newcomer and its source contradict each other: the owner takes the newcomer's place
    assert had_it or begun.facts.assignment.shadows[role.stage] == OWNER


@pytest.fixture
def after_an_update(begun):
    """Step 0 was applied, and the states after it are not agreed on yet."""
    begun.facts.ledger.agreed |= {stage: KNOWN[stage] for stage in (1, 2)}
    begun.failover.rollback.remember_step(PastStep(begun.facts.ledger, begun.facts.assignment, NO_ROWS))
    begun.coordinator.open_step(1)
    return begun


def test_states_that_were_not_agreed_on_before_are_weighed_like_those_after_an_update(after_an_update):
    after_an_update.do(after_an_update.failover.begin_again(1))

    assert after_an_update.coordinator._updates.reported_states.keys() == {1, 2}
    assert after_an_update.bodies("update_unwitnessed") == []


def test_an_update_that_one_party_alone_has_made_is_undone_where_the_other_one_is_lost(after_an_update):
    run = after_an_update
    stages = [stage for stage in (1, 2) if "worker-3" in (run.facts.holder_of(stage), run.facts.shadow_of(stage))]
    run.roster.suspect("worker-3", "silent")

    run.do(run.failover.recover_roles(None, 1))

    assert run.bodies("update_unwitnessed") == [{"step": 0, "stages": stages}]
    assert [(body["to"], body["step"]) for body in run.bodies("rolled_back")] == [(0, 1)]
    assert run.assigned[OWNER].step == 0
    assert run.facts.agreed_states == {stage: KNOWN[stage] for stage in (1, 2)}


# --- how far back ----------------------------------------------------------------------------------------------------


def test_a_conviction_takes_an_unaudited_step_back_and_a_loss_does_as_well(model_cache):
    for judged in (True, False):
        run = Run(model_cache, commit_lag=1).begun()
        run.facts.ledger.agreed |= {stage: KNOWN[stage] for stage in (1, 2)}
        run.failover.rollback.remember_step(PastStep(run.facts.ledger, run.facts.assignment, NO_ROWS))
        run.coordinator.open_step(1)
        run.facts.ledger.agreed |= {stage: KNOWN[stage] for stage in (1, 2)}
        if not judged:
            run.roster.suspect("worker-1", "silent")

        run.do(run.failover.recover_roles(run.judgement() if judged else None, 1))

        assert [(body["to"], body["step"]) for body in run.bodies("rolled_back")] == [(0, 1)]
        assert run.assigned[OWNER].step == 0


@pytest.mark.parametrize("judged", [True, False])
def test_without_an_unaudited_step_nothing_is_undone(model_cache, judged):
    run = Run(model_cache, commit_lag=1).begun()
    run.roster.suspect("worker-1", "silent")

    run.do(run.failover.recover_roles(run.judgement() if judged else None, 0))

    assert (run.bodies("rolled_back"), run.assigned[OWNER].step) == ([], 0)


# --- falling back to a checkpoint ------------------------------------------------------------------------------------


def test_falling_back_forgets_what_was_agreed_and_begins_with_the_states_of_the_checkpoint(begun):
    older = {stage: state_of(stage, "c") for stage in range(4)}
    begun.lies = {(name, stage): older[stage] for name in (*WORKERS, OWNER) for stage in range(4)}
    record, rollback = begun.facts.record, begun.failover.rollback

    begun.do(begun.failover.fall_back(5, older))

    assert begun.facts.agreed_states == {stage: older[stage] for stage in (1, 2)}
    assert begun.assigned[OWNER].step == 5
    assert begun.facts.record is not record
    assert begun.failover.rollback is not rollback


def test_what_was_proved_before_a_fall_back_convicts_first_and_only_who_takes_part(begun):
    begun.facts.proved += [begun.judgement(name, accuser=OWNER) for name in ("worker-1", "worker-1", "worker-4")]

    begun.do(begun.failover.fall_back(0, KNOWN))

    assert (begun.verdicts.asked, begun.roster.alive) == (["worker-1"], ["worker-2", "worker-3"])
    assert [body["party"] for body in begun.bodies("evicted")] == ["worker-1"]


def test_what_does_not_hold_convicts_nobody_at_a_fall_back(begun):
    begun.verdicts.holds = False
    begun.facts.proved.append(begun.judgement(accuser=OWNER))

    begun.do(begun.failover.fall_back(0, KNOWN))

    assert begun.roster.alive == list(WORKERS)


def test_an_owner_that_loses_every_worker_at_a_fall_back_goes_on_alone(begun):
    begun.mute = set(WORKERS)
    begun.take_at_most(5.0)

    begun.do(begun.failover.fall_back(0, KNOWN))

    assert (begun.roster.alive, set(begun.holders.values())) == ([], {OWNER})


def test_a_run_that_has_begun_goes_on_with_less_memory_than_it_needs_and_one_that_has_not_does_not_begin(run):
    run.members.memory_by_party = {name: {ALONE: 1} for name in (*WORKERS, OWNER)}
    with pytest.raises(ConfigError, match="memory"):
        run.do(run.failover.assign_first_roles(0, KNOWN))

    run.members.memory_by_party = {}
    run.do(run.failover.assign_first_roles(0, KNOWN))
    run.members.memory_by_party = {name: {ALONE: 1} for name in (*WORKERS, OWNER)}
    run.do(run.failover.fall_back(0, KNOWN))

    assert run.bodies("memory_short")


# --- revoked certificates --------------------------------------------------------------------------------------------


def revocation(party):
    return Revocation(party=party, message_key="ab" * 32, time=1, reason="stolen")


def test_a_revoked_party_is_replaced_and_does_not_come_back(begun):
    assert begun.roster.revoke(revocation("worker-1"), 0) is None
    assert list(begun.roster.lost) == ["worker-1"]

    begun.do(begun.failover.recover_roles(None, 0))

    assert (begun.kinds, begun.verdicts.asked) == (["revoked", "lost", "takeover", "step_redone"], [])
    with pytest.raises(PeerRefusedError, match="may not come back"):
        begun.incarnations.name_incarnation("worker-1", begins=True)


def test_of_a_revoked_party_that_is_about_to_join_the_name_is_returned(begun):
    begun.incarnations.note_arrival("worker-4")

    assert begun.roster.revoke(revocation("worker-4"), 0) == "worker-4"
    assert not begun.roster.lost


def test_a_revoked_party_that_never_came_is_only_barred(begun):
    assert begun.roster.revoke(revocation("worker-4"), 0) is None
    assert not begun.roster.lost
    with pytest.raises(PeerRefusedError, match="may not come back"):
        begun.incarnations.name_incarnation("worker-4", begins=True)


# --- coming and going ------------------------------------------------------------------------------------------------

EVEN = PaceMeter([1.0] * 4, 0)


def test_between_two_steps_a_newcomer_is_announced_and_takes_part(begun):
    begun.do(begun.failover.regroup_parties(["worker-4"], 1, EVEN))

    (joined,) = begun.bodies("party_joined")
    assert joined == {"party": "worker-4", "address": "worker-4:1", "class": "not measured", "step": 1}
    assert begun.roster.alive == [*WORKERS, "worker-4"]
    assert "worker-4" in begun.assigned


def test_a_party_that_leaves_hands_over_and_is_let_go_without_blame(begun):
    begun.roster.leaving.add("worker-1")

    begun.do(begun.failover.regroup_parties([], 1, EVEN))

    assert begun.kinds == ["stages_moved", "left"]
    assert begun.bodies("stages_moved") == [{"step": 1, "to": {"1": begun.holders[1]}, "pace_s": {}}]
    assert begun.facts.assignment.copies_of("worker-1") == ()
    assert [name for name, message in begun.told if isinstance(message, Shutdown)] == ["worker-1"]
    assert (begun.roster.alive, begun.roster.leaving) == (["worker-2", "worker-3"], set())
    assert (begun.endpoint.refused, begun.dismissed) == ([], [])
    assert begun.incarnations.name_incarnation("worker-1", begins=True)


def test_a_party_that_still_has_a_copy_stays_until_it_is_handed_over(begun):
    begun.roster.leaving.add("worker-1")
    begun.failover.placement.assign_regrouped = lambda old, staying, balance: old

    begun.do(begun.failover.regroup_parties([], 1, EVEN))

    assert (begun.roster.leaving, begun.bodies("left")) == ({"worker-1"}, [])


def test_one_that_is_lost_while_it_hands_over_has_not_left(begun):
    begun.roster.leaving.add("worker-1")
    begun.mute = begun.hanging = {"worker-1"}

    begun.do(begun.failover.regroup_parties([], 1, EVEN))

    assert (begun.bodies("left"), [body["party"] for body in begun.bodies("lost")]) == ([], ["worker-1"])
    assert begun.roster.leaving == set()


def test_stages_move_where_a_party_has_less_room_than_it_was_given(begun):
    assert not begun.failover.is_unsound(1, EVEN)

    begun.members.memory_by_party = {"worker-1": {ALONE: 1}}
    # it says so too late: what it has been given is not known to be short until roles are given out
    assert not begun.failover.is_unsound(1, EVEN)
    begun.do(begun.failover.begin_again(1))

    assert begun.bodies("memory_short")
    assert begun.failover.is_unsound(1, EVEN)


def test_stages_move_away_from_a_slow_party_only_where_pace_is_measured(begun):
    slow = PaceMeter([1.0] * 4, 2)
    slow.is_unbalanced = lambda *about: True

    assert begun.failover.is_unsound(2, slow)
    slow.every = 0
    assert not begun.failover.is_unsound(2, slow)
    assert not begun.failover.is_unsound(2, PaceMeter([1.0] * 4, 2))


def test_stages_stay_where_no_other_party_has_more_room(begun):
    begun.members.memory_by_party = {name: {ALONE: 1} for name in (*WORKERS, OWNER)}
    begun.do(begun.failover.begin_again(1))

    assert begun.bodies("memory_short")
    assert not begun.failover.is_unsound(1, EVEN)
