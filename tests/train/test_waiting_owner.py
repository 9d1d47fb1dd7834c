"""An owner that waits for parties says which are missing: of sites, of a split, of a pipeline."""

import threading

import pytest

from phalanx.errors import PeerLostError
from phalanx.security.crypto import create_authority, issue_certificate, load_identity
from phalanx.split.config import ENCLAVE
from phalanx.split.processes.arrivals import Arrivals
from phalanx.train.sessions.enclave_call import EnclaveCall, call_enclave
from phalanx.train.sessions.site_carriers import await_sites_in_time
from phalanx.transport import GrpcWire, TransportConfig, ask_peer_run

SITES = ("north", "south", "west")


class SlowSites:
    """Sites that come one by one, each time somebody waits; the last one never does."""

    def __init__(self, coming):
        self.coming, self.asked = list(coming), []

    def await_sites(self, least, timeout_s):
        self.asked.append((least, timeout_s))
        return frozenset(self.coming.pop(0) if len(self.coming) > 1 else self.coming[0])


def test_an_owner_of_rounds_names_the_sites_that_are_missing_as_others_come():
    lines, sites = [], SlowSites([{"south"}, {"south", "north"}, set(SITES)])

    there = await_sites_in_time(sites, SITES, 600.0, lines.append)

    assert there == set(SITES)
    assert [line.split(";")[0] for line in lines] == [
        "still waiting for north, west",
        "still waiting for west",
    ]
    # each wait ends with the next site
    assert [least for least, _ in sites.asked] == [1, 2, 3]


def test_an_owner_of_rounds_goes_on_with_those_that_are_there_in_time():
    assert await_sites_in_time(SlowSites([{"south"}]), SITES, 0.01, lambda line: None) <= {"south"}


@pytest.fixture
def parties(tmp_path):
    create_authority(tmp_path / "keys")
    return {
        name: load_identity(issue_certificate(tmp_path / "keys", name)) for name in ("owner", ENCLAVE, "north", "south")
    }


def test_an_enclave_tells_who_calls_which_parties_it_waits_for(parties):
    wire = GrpcWire(parties[ENCLAVE], TransportConfig())
    arrivals = Arrivals(("owner", "north", "south"), lambda line: None)
    wire.name_of, wire.awaited = arrivals.name_of, arrivals.missing_parties
    try:
        wire.serve_frames(lambda raw: b"", "session-1")
        first = ask_peer_run(parties["owner"], ENCLAVE, wire.address, begins=True)
        second = ask_peer_run(parties["north"], ENCLAVE, wire.address, begins=True)
        third = ask_peer_run(parties["south"], ENCLAVE, wire.address, begins=True)
    finally:
        wire.close()

    assert [one.awaited for one in (first, second, third)] == [("north", "south"), ("south",), ()]


@pytest.mark.parametrize(
    "claimed", [["north"], ["n" * 64, "north", 7], [f"site-{n}" for n in range(60)]], ids=["plain", "odd", "many"]
)
def test_the_owner_of_a_split_says_what_the_enclave_says_within_bounds(parties, claimed):
    wire, lines = GrpcWire(parties[ENCLAVE], TransportConfig()), []
    wire.awaited = lambda: claimed
    try:
        wire.serve_frames(lambda raw: b"", "session-1")
        call = EnclaveCall(parties["owner"], wire.address, TransportConfig(), 30.0, say=lines.append)
        with call_enclave(call):
            pass
    finally:
        wire.close()

    (line,) = lines
    assert "still waiting for" in line and len(line) < 2000
    assert "n" * 64 not in line


def test_the_owner_of_a_split_says_that_the_enclave_does_not_answer(parties, monkeypatch):
    monkeypatch.setattr("phalanx.train.sessions.enclave_call._LOOK_EVERY_S", 0.01)
    monkeypatch.setattr("phalanx.telemetry.missing._REPEAT_S", 0.0)
    lines, said = [], threading.Event()

    def say(line):
        lines.append(line)
        said.set()

    call = EnclaveCall(parties["owner"], "127.0.0.1:1", TransportConfig(), 1.0, say=say)
    with pytest.raises(PeerLostError), call_enclave(call):
        pass

    assert said.is_set() and "enclave at 127.0.0.1:1" in lines[0]
