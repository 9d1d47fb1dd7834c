"""A worker that joins badly, or not at all: the others begin without it."""

from unittest.mock import patch

import pytest

from phalanx.errors import PeerLostError
from phalanx.pipeline import ExpectedWorkers, GuardConfig, admit_workers
from phalanx.pipeline.protocol.greetings import Hello
from phalanx.pipeline.protocol.messages import Assign, Ready
from phalanx.pipeline.tolerance.numeric_class import local_numeric_class
from phalanx.security.crypto import load_identity
from phalanx.testing import Actor, MemoryCompany, OutgoingMessage, rewrite_only, tiny_run
from phalanx.transport import Endpoint, LinkFault, SignedHeader
from phalanx.transport.inbox import CheckedFrame


def hello_twice(outgoing, hello):
    return [
        outgoing,
        *[OutgoingMessage(outgoing.receiver, hello.model_copy(update={"address": "nowhere.example:1"}))] * 50,
    ]


def never_ready(outgoing, ready):
    return []


@pytest.mark.parametrize(
    ("rewrite", "lost"),
    [(rewrite_only(Hello, hello_twice), []), (rewrite_only(Ready, never_ready), ["worker-1"])],
    ids=["says hello again and again", "never gets ready"],
)
def test_whoever_joins_badly_stops_nobody(make_company, honest_digest, rewrite, lost):
    run = tiny_run()
    company = make_company(run, {1: Actor(rewrite=rewrite)})

    company.run(2)

    assert (company.lost, company.verdicts) == (lost, [])
    assert company.weights_digest() == honest_digest(run, 2)


def test_a_process_that_begins_anew_while_roles_are_given_out_stops_nobody(make_company, honest_digest, monkeypatch):
    run = tiny_run()
    company = None
    begun = []
    enter = MemoryCompany.__enter__

    def remember(self):
        nonlocal company
        company = self
        return enter(self)

    def begin_anew(assign: Assign):
        if assign.epoch == 0 and not begun:
            begun.append(company.engine.incarnations.name_incarnation("worker-1", True))

    monkeypatch.setattr(MemoryCompany, "__enter__", remember)
    made = make_company(run, {1: Actor(hear=begin_anew)})

    made.run(2)

    assert begun == [None]
    assert (made.lost, made.verdicts) == (["worker-1"], [])
    assert made.weights_digest() == honest_digest(run, 2)


def test_without_any_worker_a_run_that_had_some_does_not_begin_alone(make_company):
    nobody = {stage: Actor(rewrite=rewrite_only(Ready, never_ready)) for stage in (1, 2)}

    why = "every worker was lost before the first step: worker-1: did not start its roles within .*; worker-2: did not"
    with pytest.raises(PeerLostError, match=why):
        make_company(tiny_run(), nobody)


class Doorstep(Endpoint):
    """An owner's endpoint at which a given mail arrives, and nothing after it; only then does its clock move on."""

    party_name, session_name = "owner", "run"

    def __init__(self, *mail):
        self.mail = list(mail)
        self.known, self.sent, self.routes = {}, [], []
        self.now = 0.0

    @property
    def known_peers(self):
        return self.known

    def add_peer(self, peer, address=""):
        self.known[peer.name] = peer
        if address:
            self.routes.append((peer.name, address))

    def send_frame(self, receiver, kind, body):
        self.sent.append((receiver, kind))
        if receiver == "worker-2":
            raise PeerLostError("worker-2: the link has failed")

    def receive_item(self, timeout_s):
        if self.mail:
            return self.mail.pop(0)
        self.now += timeout_s
        return None

    def monotonic(self):
        return self.now


def hello(name, address="127.0.0.1:1"):
    body = Hello(epoch=0, address=address, numeric_class=local_numeric_class("cpu"), memory={}).model_dump(mode="json")
    return CheckedFrame(name, "hello", body, memoryview(b""), SignedHeader(b"{}", b""))


def join(company, *mail, timeout_s=0.0, may_be_absent=True, waits_for=lambda names: None):
    endpoint = Doorstep(*mail)
    home = company._home
    guests = ExpectedWorkers(
        {name: home.read_certificate(name) for name in ("worker-1", "worker-2")},
        {},
        is_alive=lambda name: True,
        last_output=lambda name: "",
        timeout_s=timeout_s,
        may_be_absent=may_be_absent,
        report_missing=waits_for,
    )
    # nothing is measured where nothing is guarded
    plan = company.plan.model_copy(update={"guard": GuardConfig(mode="off")})
    with patch("phalanx.pipeline.membership.join.time", endpoint):
        return endpoint, admit_workers(
            endpoint, plan, guests, load_identity(home.pki_directory / "owner").authority_pem
        )


def test_a_worker_that_never_says_hello_is_not_waited_for_without_end(make_company):
    company = make_company()

    _, members = join(company, hello("worker-1"), timeout_s=0.5)

    assert list(members.names) == ["worker-1"]
    # it may come later
    assert "worker-2" in members.certificates
    with pytest.raises(PeerLostError, match="worker-2 did not join"):
        join(company, hello("worker-1"), timeout_s=0.5, may_be_absent=False)
    with pytest.raises(PeerLostError, match="did not join"):
        join(company)


def test_an_owner_that_waits_hears_again_and_again_who_is_missing(make_company):
    told = []

    join(make_company(), hello("worker-1"), timeout_s=0.5, waits_for=lambda names: told.append(tuple(names)))

    assert told[0] == ("worker-1", "worker-2")
    assert set(told[1:]) == {("worker-2",)}


def test_the_first_address_counts_and_who_cannot_be_reached_is_remembered(make_company):
    fault = LinkFault("worker-1", PeerLostError("worker-1: nobody listens"))
    mail = (hello("worker-1"), hello("worker-1", "10.0.0.9:1"), fault, hello("worker-2"))

    endpoint, members = join(make_company(), *mail, timeout_s=60.0)

    assert endpoint.routes == [("worker-1", "127.0.0.1:1"), ("worker-2", "127.0.0.1:1")]
    assert endpoint.sent == [("worker-1", "setup"), ("worker-2", "setup")]
    assert list(members.unreachable) == [fault]
