"""A worker that kept what was signed in another session, under the same certificates, and shows it in this one."""

import json

import pytest

from phalanx.pipeline import OWNER, GuardConfig, PipelineConfig
from phalanx.pipeline.evidence.explain import explain_evidence
from phalanx.pipeline.protocol.messages import (
    Activation,
    AuditReport,
    Commit,
    Fault,
    FetchReply,
    GradientHeld,
    parse_message,
)
from phalanx.testing import Actor, CompanySession, MemoryCompany, rewrite_only, tiny_run
from phalanx.testing.actor import OutgoingMessage
from phalanx.transport import SignedHeader

NO_COIN = {"step_audit_rate": 0.0, "owner_audit_rate": 0.0, "screen": False}
EVERYTHING = GuardConfig(audit_rate=1.0, **NO_COIN)


def kept(signed):
    """Headers that a party keeps, by the place that they are about."""
    body = json.loads(signed.header)["body"]
    return tuple(body[name] for name in ("step", "direction", "microbatch", "source"))


@pytest.fixture(scope="module")
def pasts(tmp_path_factory, model_cache):
    """Earlier sessions, each played once: where their certificates are, and what each worker has sent in it."""
    known = {}

    def play(run):
        key = run.model_dump_json()
        if key not in known:
            sent = {stage: [] for stage in range(1, run.pipeline.stages - 1)}
            actors = {f"worker-{stage}": Actor(rewrite=hoarding(messages)) for stage, messages in sent.items()}
            home, session = tmp_path_factory.mktemp("past"), CompanySession("session-1")
            with MemoryCompany(run, home, actors, cache=model_cache, session=session) as company:
                company.run(2)
                assert company.verdicts == []
                known[key] = (company.run_dir / "pki", sent)
        return known[key]

    return play


def hoarding(messages):
    """Remember what is sent in one session, to show parts of it in another."""

    def remember(outgoing):
        messages.append(outgoing)
        return [outgoing]

    return remember


@pytest.fixture
def sessions(pasts, make_company):
    """Tell what a worker sent of a kind in a session with other data, and make a company with its certificates.

    What is signed in it has other digests at the same places.
    """

    def learn(run, kind, stage, **changes):
        earlier = tiny_run(run.pipeline.stages, guard=EVERYTHING)
        train = earlier.train.model_copy(update={"seed": run.train.seed + 1, **changes})
        pki, sent = pasts(earlier.model_copy(update={"train": train}))
        here = run.model_copy(update={"pipeline": run.pipeline.model_copy(update={"pki": str(pki)})})
        messages = [outgoing for outgoing in sent[stage] if isinstance(outgoing.message, kind)]
        return messages, lambda actors: make_company(here, actors, session="session-2")

    return learn


def found(company):
    return [(verdict.party, verdict.offence) for verdict in company.verdicts]


@pytest.mark.quick_cases("forward")
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_input_of_another_session_in_a_commitment_convicts_who_shows_it(sessions, honest_digest, direction):
    run = tiny_run(5, guard=EVERYTHING)
    messages, make = sessions(run, Commit, 2)
    past = {kept(signed): signed for outgoing in messages for signed in outgoing.message.received}

    def show(outgoing, commit):
        old = [signed for signed in commit.received if kept(signed)[:3] == (1, direction, 2)]
        new = tuple(past[kept(signed)] if signed in old else signed for signed in commit.received)
        return [outgoing.with_fields({"received": new})]

    company = make({2: Actor(rewrite=rewrite_only(Commit, show))})
    company.run(3)

    assert found(company) == [("worker-2", "forgery")]
    assert "another session" in company.verdicts[0].reason
    assert company.weights_digest() == honest_digest(run, 3)
    facts = explain_evidence(company.run_dir / str(company.verdicts[0].evidence), session="session-2")
    assert "another session" in str(facts["conclusion"])
    assert facts["rests on the owner's word"] == "nothing"


@pytest.mark.quick_cases("2-worker-1")
@pytest.mark.parametrize(("stage", "victim"), [(1, OWNER), (2, "worker-1")])
def test_an_input_of_another_session_in_a_report_convicts_who_shows_it(sessions, honest_digest, stage, victim):
    run = tiny_run(5, guard=EVERYTHING)
    auditor = stage + 1
    messages, make = sessions(run, AuditReport, auditor)
    past = {kept(signed): signed for outgoing in messages for signed in outgoing.message.inputs}

    def show(outgoing, report):
        if (report.stage, report.step, report.microbatch) != (stage, 1, 0):
            return [outgoing]
        new = tuple(past[kept(signed)] if "forward" in kept(signed) else signed for signed in report.inputs)
        assert new != report.inputs
        return [outgoing.with_fields({"inputs": new})]

    company = make({auditor: Actor(rewrite=rewrite_only(AuditReport, show))})
    assert company.engine.stage_shadows[stage] == f"worker-{auditor}"
    assert company.engine.stage_holders[stage - 1] == victim
    company.run(3)

    assert found(company) == [(f"worker-{auditor}", "forgery")]
    assert company.weights_digest() == honest_digest(run, 3)


def test_parts_of_a_gradient_of_another_session_convict_the_shadow_that_shows_them(sessions, honest_digest):
    run = tiny_run(guard=EVERYTHING)
    messages, make = sessions(run, GradientHeld, 2)
    past = {(outgoing.message.step, outgoing.message.stage): outgoing.message for outgoing in messages}

    def show(outgoing, held):
        if held.step != 1:
            return [outgoing]
        old = past[(1, held.stage)]
        return [outgoing.with_fields({"gradient": old.gradient, "norm_squared": old.norm_squared, "parts": old.parts})]

    company = make({2: Actor(rewrite=rewrite_only(GradientHeld, show))})
    company.run(3)

    assert found(company) == [("worker-2", "gradient")]
    assert company.weights_digest() == honest_digest(run, 3)


@pytest.mark.slow
def test_a_wrong_shape_of_another_session_convicts_who_complains_of_it(sessions, honest_digest):
    run = tiny_run(guard=EVERYTHING)
    # half as many sequences: a genuine message of that session has no shape of this one
    messages, make = sessions(run, Commit, 2, batch_size=4)
    past = {kept(signed): signed for outgoing in messages for signed in outgoing.message.received}

    def complain(outgoing, commit):
        evidence = past[(1, "forward", 0, 1)]
        fault = Fault(epoch=commit.epoch, about="worker-1", error="FrameError", reason="odd", evidence=evidence)
        return [outgoing, OutgoingMessage(OWNER, fault)] if commit.step == 1 else [outgoing]

    company = make({2: Actor(rewrite=rewrite_only(Commit, complain))})
    company.run(3)

    assert found(company) == [("worker-2", "forgery")]
    assert company.weights_digest() == honest_digest(run, 3)


def test_a_tensor_of_another_session_is_not_handed_on(sessions, honest_digest):
    # worker-1 withholds a tensor and shows the owner, who would hand it on, the one of the session before
    run = tiny_run(5, guard=EVERYTHING, pipeline=PipelineConfig(stages=5, step_timeout_s=30.0, patience_s=1.0))
    messages, make = sessions(run, FetchReply, 1)
    old = next(outgoing for outgoing in messages if is_about(outgoing.message, 1, 0))

    def withhold(outgoing):
        message = outgoing.message
        if isinstance(message, Activation) and is_about(message, 1, 0):
            return []
        if isinstance(message, FetchReply) and not message.claim and is_about(message, 1, 0):
            return [
                OutgoingMessage(
                    outgoing.receiver, message.model_copy(update={"evidence": old.message.evidence}), old.payload
                )
            ]
        return [outgoing]

    company = make({1: Actor(rewrite=withhold)})
    company.run(3)

    assert (found(company), company.lost) == ([], ["worker-1"])
    assert company.event_bodies("relayed") == []
    assert company.weights_digest() == honest_digest(run, 3)


def is_about(message, step, microbatch):
    """Whether it is about a forward tensor out of stage 1."""
    return (message.source, message.direction, message.step, message.microbatch) == (1, "forward", step, microbatch)


def test_a_fetched_input_of_another_session_is_asked_for_elsewhere(sessions, honest_digest):
    # worker-1 answers the auditor of stage 2 with what it sent in the session before, under its genuine header
    run = tiny_run(5, guard=EVERYTHING)
    messages, make = sessions(run, FetchReply, 1)
    past = {
        (outgoing.message.step, outgoing.message.microbatch): outgoing
        for outgoing in messages
        if outgoing.message.source == 1 and outgoing.message.direction == "forward"
    }

    def answer(outgoing, fetched):
        old = past.get((fetched.step, fetched.microbatch))
        if old is None or fetched.claim or fetched.source != 1 or fetched.direction != "forward":
            return [outgoing]
        return [
            OutgoingMessage(
                outgoing.receiver, fetched.model_copy(update={"evidence": old.message.evidence}), old.payload
            )
        ]

    assert past
    company = make({1: Actor(rewrite=rewrite_only(FetchReply, answer))})
    company.run(2)

    assert (found(company), company.lost) == ([], [])
    assert company.weights_digest() == honest_digest(run, 2)


def test_the_certificates_are_the_same_in_both_sessions(sessions):
    """Without the binding to the session each of the headers above would be genuine in every other respect."""
    messages, make = sessions(tiny_run(), Commit, 2)
    company = make({})
    message = messages[0].message
    signed = message.received[0]

    fields = json.loads(signed.header)
    assert isinstance(parse_message(fields["kind"], fields["body"]), Activation)
    peers = {
        OWNER: company.engine._context.mail.find_peer(OWNER),
        "worker-1": company.engine._context.mail.find_peer("worker-1"),
    }
    SignedHeader(signed.header.encode(), bytes.fromhex(signed.signature)).verify_sender(peers[fields["sender"]])
    assert fields["run"] == "session-1"
