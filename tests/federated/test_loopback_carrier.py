"""Over real TLS rounds come to the same, sites come back, and only certified sites of the run are let in."""

import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
import torch
from loopback_scene import SITES, DeadSiteError, LoopbackScene
from rounds_scene import Scene

from phalanx.errors import FrameError, PeerLostError, PeerRefusedError, TransportError
from phalanx.federated.carriers import loopback, loopback_site
from phalanx.security.crypto import Identity, RevokedParties, create_authority, issue_certificate, load_identity


@pytest.fixture
def scene(tmp_path, monkeypatch):
    # how often a site looks whether its owner is there, and how long an owner waits for its last word to arrive
    monkeypatch.setattr(loopback_site, "_LOOK_EVERY_S", 0.5)
    monkeypatch.setattr(loopback, "_END_S", 60.0)
    made = []

    def make(**section) -> LoopbackScene:
        made.append(LoopbackScene(tmp_path, **section))
        return made[0]

    yield make
    for one in made:
        one.close()


def dying_in(site, kind, phase=None):
    """The answers of a site with a process that ends at an order of a kind."""

    def answer(order, payload):
        if order.kind == kind and getattr(order, "phase", None) == phase:
            raise DeadSiteError
        return site.answer_order(order, payload)

    return answer


def test_rounds_are_those_of_one_process_and_the_run_ends_for_all(scene, tmp_path):
    over_tls = scene(secure=True, min_cohort=3)
    over_tls.call_all()
    alone = Scene(tmp_path / "alone", list(over_tls.trainers.values()))

    for number in (1, 2):
        over_tls.owner.run_round(number, 0.5)
        alone.owner.run_round(number, 0.5)
    measured = over_tls.owner.measure_at_sites()
    over_tls.close()

    torch.testing.assert_close(over_tls.owner.weights["w"], alone.w, atol=1e-5, rtol=1e-5)
    assert set(measured) == set(SITES)
    assert over_tls.ended == dict.fromkeys(SITES)


@pytest.mark.parametrize("place", [("train", None), ("sum", "mask")])
def test_a_process_that_ends_is_dropped_and_its_successor_rejoins(scene, place):
    made = scene(secure=True, min_cohort=3)
    for name in SITES[1:]:
        made.call(name)
    dead = made.call("north", answer=dying_in(made.site("north"), *place))
    made.carrier.await_sites(4, 30.0)
    killed = {"north": "exit code 9"}
    made.carrier.watch_processes(_Ends(dead, killed))

    first = made.owner.run_round(1, 0.5)
    made.call("north")
    made.carrier.await_sites(4, 30.0)
    second = made.owner.run_round(2, 0.5)

    assert first.left_out == {"north": "gone"} and sorted(first.shares) == sorted(SITES[1:])
    assert sorted(second.shares) == sorted(SITES)
    assert "north.2: joined the owner's session" in made.said


class _Ends:
    """The word of a supervisor that a process has ended, once its thread has."""

    def __init__(self, thread, how):
        self._thread, self._how = thread, how

    def restart_ended_sites(self):
        if self._thread.is_alive():
            return {}
        how, self._how = self._how, {}
        return how

    def close(self):
        pass


def test_a_site_stays_with_an_owner_that_is_slow_to_answer(scene):
    made = scene()
    name_of, looked = made.carrier._wire.name_of, set()

    def name_late(certified, begins):
        if not begins and certified not in looked:
            # longer than one look of a site takes
            time.sleep(2 * loopback_site._LOOK_EVERY_S)
            looked.add(certified)
        return name_of(certified, begins)

    made.carrier._wire.name_of = name_late
    made.call_all()
    while looked != set(SITES):
        made.carrier.present_sites()

    record = made.owner.run_round(1, 0.5)

    assert sorted(record.shares) == sorted(SITES)
    assert sorted(made.said) == sorted(f"{name}: joined the owner's session" for name in SITES)


def test_a_site_in_the_middle_of_a_look_hears_that_the_run_is_over(scene):
    made = scene()
    name_of, looked = made.carrier._wire.name_of, threading.Event()

    def name_nobody_again(certified, begins):
        if begins:
            return name_of(certified, begins)
        # the site asks until its look has taken its time, and then looks again
        looked.set()
        return None

    made.carrier._wire.name_of = name_nobody_again
    made.call_all()
    assert looked.wait(60.0)

    made.close()

    assert made.ended == dict.fromkeys(SITES)


def test_only_certified_sites_of_this_run_are_let_in(scene, tmp_path, monkeypatch):
    # one of the callers leaves without a word
    made = scene()
    monkeypatch.setattr(loopback, "_END_S", 0.5)
    issue_certificate(made.keys, "stranger")
    create_authority(tmp_path / "foreign")
    issue_certificate(tmp_path / "foreign", "south")
    foreign = load_identity(tmp_path / "foreign" / "south")
    trusting = Identity(
        "south",
        foreign.signing_key,
        foreign.tls_key_pem,
        foreign.certificate_pem,
        made.identities["owner"].authority_pem,
    )
    issued = datetime.now(UTC) - timedelta(days=10)
    callers = {
        "stranger": load_identity(made.keys / "stranger"),
        "south": trusting,
        "west": made.expired("west", issued),
    }

    answer = made.site("north").answer_order
    threads = [made.call("stranger", callers.pop("stranger"), answer), made.call("north", session="another run")]
    # who gets no further than a handshake asks again until its patience ends
    threads += [made.call(name, identity, answer, patience_s=1.0) for name, identity in callers.items()]
    for thread in threads:
        thread.join(30.0)

    assert made.carrier.present_sites() <= {"north"}
    assert isinstance(made.ended["stranger"], PeerRefusedError)
    assert all(isinstance(made.ended[name], TransportError) for name in ("south", "west"))
    assert isinstance(made.ended["north"], FrameError)
    assert any("stranger belongs to no site of this run" in line for line in made.said)


def test_a_site_with_a_certificate_that_is_revoked_is_parted_from_and_does_not_come_back(scene):
    made = scene()
    made.call_all()
    made.owner.run_round(1, 0.5)

    RevokedParties(made.keys).revoke_party("west", "the disk was stolen")
    record = made.owner.run_round(2, 0.5)
    for thread in (made.threads[SITES.index("west")], made.call("west")):
        thread.join(30.0)
        assert not thread.is_alive()

    assert sorted(record.shares) == ["east", "north", "south"]
    assert isinstance(made.ended["west"], PeerRefusedError | PeerLostError)
