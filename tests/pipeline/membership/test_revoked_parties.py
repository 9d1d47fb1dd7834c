"""A party with a revoked certificate is dropped between two steps without a verdict, and stays out."""

import pytest

from phalanx.errors import CertificateError, FrameError, OrderError, PeerRefusedError
from phalanx.pipeline import Callers, GuardConfig, PipelineConfig
from phalanx.pipeline.membership.members import Incarnations
from phalanx.pipeline.protocol.messages import Ask
from phalanx.security.crypto import Identity
from phalanx.testing import MemoryCompany, tiny_run
from phalanx.testing.endpoint import MemoryNetwork
from phalanx.transport import Endpoint, TransportConfig


def company_run(stages=4, respawns=0, **guard):
    pipeline = PipelineConfig(stages=stages, respawns=respawns, returns=3, step_timeout_s=30.0)
    return tiny_run(pipeline=pipeline, guard=GuardConfig(step_audit_rate=0.0, owner_audit_rate=0.0, **guard))


@pytest.fixture
def company_of(tmp_path_factory, model_cache):
    made = []

    def make(run):
        company = MemoryCompany(run, tmp_path_factory.mktemp("run"), cache=model_cache)
        made.append(company.__enter__())
        return company

    yield make
    for company in made:
        company.__exit__(None, None, None)


def roles(company):
    return {*company.engine.stage_holders.values(), *company.engine.stage_shadows.values()}


def test_its_stage_is_taken_over_at_the_next_step_and_no_bit_changes(company_of, honest_digest):
    run = company_run()
    company = company_of(run)
    company.run(1)
    assert company.engine.stage_holders[1] == "worker-1"

    entry = company.revoke_party("worker-1", "the laptop was stolen")
    company.run(2)

    (told,) = company.event_bodies("revoked")
    assert (told["party"], told["reason"], told["step"]) == ("worker-1", "the laptop was stolen", 1)
    assert told["message_key"] == entry.message_key == company.party_identity("worker-1").public.public_key.hex()
    assert (company.lost, company.evicted, company.verdicts) == (["worker-1"], [], [])
    assert [body["stage"] for body in company.event_bodies("takeover")] == [1]
    assert "worker-1" not in roles(company)
    assert not list(company.run_dir.glob("evidence/*"))
    assert company.weights_digest() == honest_digest(run, 3)


@pytest.mark.parametrize("guard", [{"commit_lag": 1}, {"keep_states": 2}], ids=str)
def test_so_it_is_where_steps_may_be_undone(company_of, honest_digest, guard):
    run = company_run(**guard)
    company = company_of(run)
    company.run(1)
    company.revoke_party("worker-1")

    company.run(1)

    assert (company.lost, company.verdicts) == (["worker-1"], [])
    assert "worker-1" not in roles(company)
    assert company.weights_digest() == honest_digest(run, 2)


def test_it_does_not_come_back_in_the_same_session(company_of):
    company = company_of(company_run())
    company.revoke_party("worker-1")
    company.run(1)
    assert company.lost == ["worker-1"]

    with pytest.raises(PeerRefusedError, match="worker-1 was excluded and may not come back"):
        company.come_back("worker-1")


def test_no_other_worker_talks_to_it_any_more(company_of):
    company = company_of(company_run())
    company.run(1)
    company.revoke_party("worker-1")
    company.run(1)
    neighbour, certified = company.worker_endpoint("worker-2"), "worker-1"

    before = neighbour.refusal_counts.get(certified, 0)
    neighbour.answer_frame(b"whatever it says", certified)

    assert neighbour.refusal_counts[certified] == before + 1
    assert "is evicted" in str(neighbour.last_refusal(certified))
    with pytest.raises(PeerRefusedError):
        neighbour.send_frame("worker-1", Ask.kind, {"epoch": 0, "step": 1})


def test_one_that_is_lost_when_it_is_revoked_does_not_come_back(company_of, honest_digest):
    run = company_run()
    company = company_of(run)
    company.kill_worker("worker-1")
    company.run(1)
    assert company.lost == ["worker-1"]

    company.revoke_party("worker-1")
    company.run(1)

    with pytest.raises(PeerRefusedError, match="excluded"):
        company.come_back("worker-1")
    assert [body["party"] for body in company.event_bodies("revoked")] == ["worker-1"]
    assert company.lost == ["worker-1"]
    assert company.weights_digest() == honest_digest(run, 2)


def test_one_that_has_said_hello_and_has_no_role_yet_gets_none(company_of, honest_digest):
    run = company_run(respawns=1)
    company = company_of(run)
    late = run.pipeline.late_workers[0]
    company.start_worker(late)
    company.revoke_party(late)

    company.run(3)

    assert late not in roles(company)
    assert [body for body in company.event_bodies("party_joined") if body["party"] == late] == []
    assert company.weights_digest() == honest_digest(run, 3)


def test_a_party_of_another_run_on_the_list_is_passed_over(company_of, tmp_path, monkeypatch):
    company = company_of(company_run())
    entry = company.revoke_party("worker-1").model_copy(update={"party": "stranger"})
    monkeypatch.setattr(company.engine._context.members, "revoked", lambda: {"stranger": entry})

    company.run(1)

    assert (company.event_bodies("revoked"), company.lost) == ([], [])


def test_a_list_that_cannot_be_read_ends_the_run_and_does_not_pass_for_an_empty_one(company_of):
    company = company_of(company_run())
    company.run(1)
    company.revoke_party("worker-1")
    path = company.run_dir / "pki" / "revoked.json"
    path.write_bytes(path.read_bytes()[:-3])

    with pytest.raises(CertificateError, match="is no list of revocations, so no party is admitted"):
        company.run(1)


@pytest.fixture
def door():
    """An owner's endpoint that knows a worker which has not come, as one of `may_join`."""
    peers = {"late": Identity.without_certificate("late").public}
    owner = Identity.without_certificate("owner")
    with Endpoint(owner, peers, "run-1", MemoryNetwork().wire_for("owner"), TransportConfig()) as endpoint:
        yield endpoint


def test_one_that_has_not_come_is_refused_though_it_does_not_say_that_it_begins(door):
    incarnations = Incarnations(door, (), 3)

    assert incarnations.bar_certificate("late") is None

    door.answer_frame(b"hello", "late")
    assert "is evicted" in str(door.last_refusal("late"))
    with pytest.raises(PeerRefusedError, match="may not come back"):
        incarnations.name_incarnation("late", True)


def test_before_it_is_barred_its_frames_are_read(door):
    door.answer_frame(b"hello", "late")

    assert isinstance(door.last_refusal("late"), FrameError | OrderError)


def test_a_later_incarnation_that_has_a_name_and_has_not_spoken_is_refused_as_well(door):
    incarnations = Incarnations(door, (), 3)
    incarnations.note_arrival("late")
    incarnations.note_end("late", for_good=False)
    assert incarnations.name_incarnation("late", True) == "late.2"

    incarnations.bar_certificate("late")

    door.answer_frame(b"hello", "late")
    assert "is evicted" in str(door.last_refusal("late"))


def test_who_calls_with_a_revoked_certificate_is_told_so_and_gets_no_name():
    said = []
    callers = Callers(lambda name, begins: name, ("alice", "bob"), said.append, lambda: {"alice"})

    for begins in (True, False):
        with pytest.raises(PeerRefusedError, match="the certificate of alice was revoked by the owner"):
            callers.name_caller("alice", begins)

    assert callers.name_caller("bob", True) == "bob"
    assert len(said) == 2


def test_nobody_who_calls_is_let_in_while_the_list_cannot_be_read():
    def unreadable():
        raise CertificateError("revoked.json: is damaged")

    callers = Callers(lambda name, begins: name, ("alice",), lambda line: None, unreadable)

    with pytest.raises(PeerRefusedError, match="cannot be read, so no party is admitted"):
        callers.name_caller("alice", True)
