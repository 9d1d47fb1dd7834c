"""Messages from the wrong party, twice, too late or to the wrong address: refused or dropped, and the run goes on."""

import pytest

from phalanx.lab.attacks import make_actor
from phalanx.pipeline import AttackConfig, GuardConfig, StateDigest, local_numeric_class
from phalanx.pipeline.protocol.greetings import Hello, Setup
from phalanx.pipeline.protocol.messages import (
    Activation,
    Apply,
    Assign,
    Audit,
    AuditReport,
    Bulk,
    Commit,
    Fault,
    Fetch,
    FetchBulk,
    FetchReply,
    GradientHeld,
    PassedOnHeader,
    Release,
    Role,
    ScreenHit,
    Shutdown,
    UpdateReport,
)
from phalanx.testing import Actor, OutgoingMessage, rewrite_only, tiny_run

TENSOR = bytes(2 * 8 * 16 * 4)
NOW = {"epoch": 0, "step": 0}
STATE = StateDigest(step=0, weights="1" * 64, moments="2" * 64)


def tensor_message(source, target, direction="forward", **where):
    return Activation(
        **(NOW | {"microbatch": 0, "dtype": "float32", "shape": (2, 8, 16)} | where),
        direction=direction,
        source=source,
        target=target,
    )


def with_each_commit(*extra):
    """Send further messages along with each commitment of step 0."""
    return Actor(
        rewrite=rewrite_only(Commit, lambda outgoing, commit: [outgoing, *(extra if commit.step == 0 else ())])
    )


def assign_all_to(name):
    roles = tuple(Role(stage=n, holder=name, shadow=None, source=name, newcomers=()) for n in range(4))
    return Assign(epoch=9, step=0, roles=roles, addresses={}, certificates={})


FETCH = {**NOW, "microbatch": 0, "direction": "forward"}
TO_A_WORKER = {
    "apply": Apply(**NOW, clip_coefficient=0.0),
    "assign": assign_all_to("worker-1"),
    "audit": Audit(**NOW, stage=1, microbatches=(0,), directions=("forward",), order=1, urgent=True),
    "release": Release(**FETCH, source=1),
    "fetch weights": FetchBulk(**NOW, stage=2, purpose="weights"),
    "fetch a duplicate": FetchBulk(**NOW, stage=2, purpose="duplicate"),
    "fetch a claim": Fetch(**FETCH, source=1, claim=True),
    "fetch of a foreign link": Fetch(**FETCH, source=2, claim=False),
    "setup": Setup(epoch=0, plan={}),
    "shutdown": Shutdown(epoch=0, reason="I say so"),
    "commit": Commit(**NOW, stage=1, received=(), sent=(), norm_squared=1.0, gradient=""),
}


def faults_of(company, party):
    """What a party complained about, as (party, error)."""
    return [(body["about"], body["error"]) for body in company.event_bodies("fault") if body["party"] == party]


def test_a_worker_takes_orders_from_the_owner_only(make_company, honest_digest):
    orders = [OutgoingMessage("worker-2", message) for message in TO_A_WORKER.values()]
    company = make_company(tiny_run(), {1: with_each_commit(*orders)})

    company.run(2)

    # each refusal is written down, and is no verdict
    assert faults_of(company, "worker-2") == [("worker-1", "FrameError")] * len(orders)
    assert company.verdicts == []
    assert company.weights_digest() == honest_digest(tiny_run(), 2)


BAD_TENSORS = {
    "not its link": tensor_message(0, 1, "forward"),
    "to itself": tensor_message(2, 2),
    "another's gradient": tensor_message(3, 2, "backward"),
    "of a far step": tensor_message(1, 2, step=7),
    "of a microbatch too many": tensor_message(1, 2, microbatch=4),
    "twice": tensor_message(1, 2),
    "gradient of another's stage": Bulk(**NOW, purpose="gradient", stage=2, offset=0, total=4),
    "state that was not expected": Bulk(**NOW, purpose="state", stage=2, offset=0, total=4),
    "duplicate that nobody asked for": Bulk(**NOW, purpose="duplicate", stage=2, offset=0, total=4),
    "answer that nobody asked for": FetchReply(**FETCH, source=3, claim=False, evidence=None),
}


def test_a_worker_takes_tensors_from_its_neighbours_only_and_once(make_company, honest_digest):
    strays = [OutgoingMessage("worker-2", message, TENSOR) for message in BAD_TENSORS.values()]
    company = make_company(tiny_run(), {1: with_each_commit(*strays)})

    company.run(2)

    assert faults_of(company, "worker-2") == [("worker-1", "FrameError")] * len(strays)
    assert company.verdicts == []
    assert company.weights_digest() == honest_digest(tiny_run(), 2)


TO_THE_OWNER = {
    "commitment of another stage": Commit(**NOW, stage=2, received=(), sent=(), norm_squared=1.0, gradient=""),
    "commitment of the owner's stage": Commit(**NOW, stage=0, received=(), sent=(), norm_squared=1.0, gradient=""),
    "commitment of no stage": Commit(**NOW, stage=33, received=(), sent=(), norm_squared=1.0, gradient=""),
    "gradient of a stage that it does not shadow": GradientHeld(
        **NOW, stage=1, norm_squared=1.0, gradient="", parts=()
    ),
    "audit of its own stage": AuditReport(**NOW, stage=1, microbatch=0, inputs=(), digests={}, order=1),
    "state of a stage that it does not have": UpdateReport(**NOW, states={"0": STATE}, usage={}, bytes_sent={}),
    "state of no stage": UpdateReport(**NOW, states={"77": STATE}, usage={}, bytes_sent={}),
    "alarm about a message to another": ScreenHit(**FETCH, source=2, reason="odd"),
    "duplicate that nobody asked for": Bulk(**NOW, purpose="duplicate", stage=1, offset=0, total=4),
    "alarm about no stage": ScreenHit(**FETCH, source=33, reason="odd"),
    "order": Apply(**NOW, clip_coefficient=1.0),
    "roles": assign_all_to("worker-1"),
    "greeting": Hello(epoch=0, address="elsewhere", numeric_class=local_numeric_class("cpu")),
}


def test_the_owner_refuses_what_the_sender_has_no_part_in(make_company, honest_digest):
    strays = [OutgoingMessage("owner", message) for message in TO_THE_OWNER.values()]
    company = make_company(tiny_run(), {1: with_each_commit(*strays)})

    company.run(2)

    refused = [body["error"] for body in company.event_bodies("refused") if body["party"] == "worker-1"]
    assert refused == ["FrameError"] * len(strays)
    assert company.verdicts == []
    assert company.weights_digest() == honest_digest(tiny_run(), 2)


def test_everything_said_twice_changes_nothing(make_company, honest_digest):
    # each copy is signed anew, so that the chain of headers does not refuse it
    run = tiny_run(guard=GuardConfig(audit_rate=0.5))
    twice = Actor(rewrite=lambda outgoing: [outgoing, outgoing])
    company = make_company(run, {1: twice, 2: twice})

    company.run(2)

    assert company.verdicts == []
    assert company.weights_digest() == honest_digest(run, 2)


def test_messages_of_an_older_epoch_are_dropped_without_a_word(make_company, honest_digest):
    # worker-3 sends each tensor of epoch 1 also as one of epoch 0, and as one of an epoch to come
    def old_and_new(outgoing, message):
        if message.epoch == 0:
            return [outgoing]
        return [outgoing.with_fields({"epoch": 0}), outgoing.with_fields({"epoch": 9}), outgoing]

    run = tiny_run(5)
    liar = make_actor(AttackConfig(kind="forward_sign_flip", from_step=1), "worker-1")
    company = make_company(run, {1: liar, 3: Actor(rewrite=rewrite_only(Activation, old_and_new))})

    company.run(3)

    assert company.evicted == ["worker-1"]
    assert company.event_bodies("fault") == []
    assert company.weights_digest() == honest_digest(run, 3)


UNSIGNED = PassedOnHeader(header='{"sender":"worker-2"}', signature="00" * 64)
NONSENSE = PassedOnHeader(header="no JSON", signature="zz")


def complaint(about, evidence):
    return Fault(epoch=0, about=about, error="FrameError", reason="it is evil", evidence=evidence)


def test_a_complaint_without_a_signature_convicts_nobody(make_company, honest_digest):
    complaints = [complaint(about, None) for about in ("worker-2", "nobody", "owner")]
    complaints += [complaint("owner", evidence) for evidence in (UNSIGNED, NONSENSE)]
    company = make_company(
        tiny_run(), {1: with_each_commit(*(OutgoingMessage("owner", fault) for fault in complaints))}
    )

    company.run(2)

    assert len(faults_of(company, "worker-1")) == len(complaints)
    assert company.verdicts == []
    assert company.weights_digest() == honest_digest(tiny_run(), 2)


@pytest.mark.quick_cases("worker-2-unsigned")
@pytest.mark.parametrize(
    ("about", "evidence"),
    [
        pytest.param("worker-2", UNSIGNED, id="worker-2-unsigned"),
        pytest.param("nobody", NONSENSE, id="nobody-nonsense"),
        pytest.param("worker-2", NONSENSE, id="worker-2-nonsense", marks=pytest.mark.slow),
        pytest.param("nobody", UNSIGNED, id="nobody-unsigned", marks=pytest.mark.slow),
    ],
)
def test_a_complaint_with_a_header_that_was_never_sent_convicts_its_author(
    make_company, honest_digest, about, evidence
):
    company = make_company(tiny_run(), {1: with_each_commit(OutgoingMessage("owner", complaint(about, evidence)))})

    company.run(2)

    assert [(verdict.party, verdict.offence) for verdict in company.verdicts] == [("worker-1", "forgery")]
    assert company.weights_digest() == honest_digest(tiny_run(), 2)
