"""Certificates of the parties of a split, over real TLS: wrong, expired, not yet valid, of another name or revoked."""

import contextlib
import shutil
from datetime import UTC, datetime, timedelta

import pytest
from remote_house import CLIENTS, RemoteHouse

from phalanx.errors import CertificateError, PeerLostError, PeerRefusedError
from phalanx.security.crypto import (
    Identity,
    RevokedParties,
    create_authority,
    issue_certificate,
    load_authority,
    load_identity,
    peer_from_certificate,
)
from phalanx.split import ENCLAVE
from phalanx.split.config import OWNER
from phalanx.split.processes.arrivals import Arrivals
from phalanx.train.batches.remote_turns import RemoteTurns
from phalanx.train.engines.split_engine import RemoteClients
from phalanx.train.sessions.enclave_call import EnclaveCall, call_enclave
from phalanx.train.sessions.split_parties import SplitRevocations
from phalanx.transport import GrpcWire, TransportConfig

LIMITS = TransportConfig(timeout_s=10.0)
NOW = datetime.now(UTC)
SHORT_S = 1.0
"""How long a caller tries that no handshake will ever let in."""
PARTIES = (OWNER, *CLIENTS)
AT_ANOTHER_TIME = {"expired": 10, "future": -10}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """The run's authority, a foreign one that certifies the same names, and certificates outside of their days."""
    home = tmp_path_factory.mktemp("pki")
    create_authority(home / "own", now=NOW - timedelta(days=40))
    create_authority(home / "foreign")
    for name, ago in AT_ANOTHER_TIME.items():
        # the same authority, so that nothing but the days is wrong
        shutil.copytree(home / "own", home / name)
        for party in (ENCLAVE, *PARTIES):
            issue_certificate(home / name, party, days=5, now=NOW - timedelta(days=ago))
    for party in (ENCLAVE, *PARTIES):
        issue_certificate(home / "own", party)
        issue_certificate(home / "foreign", party)
    return home


def identity_of(home, name, authority=None, now=None):
    """An identity of a directory; with another authority it trusts that one, so that only the other side can refuse."""
    found = load_identity(home / name, now=now)
    if authority is None:
        return found
    trusted = load_authority(authority / "authority.pem")
    return Identity(found.name, found.signing_key, found.tls_key_pem, found.certificate_pem, trusted)


class Listening:
    """An enclave that waits for its parties, and the parties that have come."""

    def __init__(self, identity, names=PARTIES):
        self.said, self.frames = [], []
        self.arrivals = Arrivals(names, self.said.append)
        self.wire = GrpcWire(identity, LIMITS)
        self.wire.name_of = self.arrivals.name_of
        self.wire.serve_frames(lambda raw, sender: self.frames.append(sender) or b"", "session")

    def call(self, identity, expected=None, patience_s=20.0):
        """Call it as a party, and hang up."""
        asked = EnclaveCall(identity, self.wire.address, LIMITS, patience_s)
        with call_enclave(asked, expected) as called:
            return called.peer

    @property
    def came(self):
        return set(self.arrivals._came)


@pytest.fixture
def listen(keys):
    with contextlib.ExitStack() as stack:

        def start(identity=None, names=PARTIES):
            listening = Listening(identity or identity_of(keys / "own", ENCLAVE), names)
            stack.callback(listening.wire.close)
            return listening

        yield start


def test_a_client_with_the_runs_certificate_is_let_in(listen, keys):
    enclave = listen()

    assert enclave.call(identity_of(keys / "own", "north")).name == ENCLAVE
    assert enclave.came == {"north"}


@pytest.mark.parametrize("party", PARTIES)
def test_a_certificate_of_another_authority_lets_nobody_in(listen, keys, party):
    enclave = listen()

    with pytest.raises((PeerLostError, PeerRefusedError)):
        enclave.call(identity_of(keys / "foreign", party, authority=keys / "own"), patience_s=SHORT_S)

    assert (enclave.came, enclave.frames) == (set(), [])


@pytest.mark.parametrize("party", [OWNER, "north"])
@pytest.mark.parametrize("days", AT_ANOTHER_TIME)
def test_a_certificate_outside_its_days_lets_nobody_in(listen, keys, days, party):
    enclave = listen()
    identity = identity_of(keys / days, party, now=NOW - timedelta(days=AT_ANOTHER_TIME[days]))

    with pytest.raises((PeerLostError, PeerRefusedError, CertificateError)):
        enclave.call(identity, patience_s=SHORT_S)

    assert (enclave.came, enclave.frames) == (set(), [])


def test_a_client_does_not_even_start_with_its_own_certificate_expired(keys):
    with pytest.raises(CertificateError, match="expired"):
        identity_of(keys / "expired", "north")


def test_a_certified_party_that_the_run_file_does_not_name_is_refused(listen, keys):
    enclave = listen(names=(OWNER, "north"))

    with pytest.raises(PeerRefusedError, match="south"):
        enclave.call(identity_of(keys / "own", "south"))

    assert enclave.came == set()
    assert enclave.said == ["refused a caller: south is not a party of this run"]


@pytest.mark.parametrize("stands", ["foreign", "expired", "future", "south"])
def test_a_client_says_nothing_to_an_enclave_without_its_certificate(listen, keys, stands):
    impostors = {
        "foreign": lambda: identity_of(keys / "foreign", ENCLAVE, authority=keys / "own"),
        "expired": lambda: identity_of(keys / "expired", ENCLAVE, now=NOW - timedelta(days=10)),
        "future": lambda: identity_of(keys / "future", ENCLAVE, now=NOW + timedelta(days=10)),
        "south": lambda: identity_of(keys / "own", "south"),
    }
    enclave = listen(impostors[stands]())

    with pytest.raises((PeerLostError, PeerRefusedError, CertificateError)):
        enclave.call(identity_of(keys / "own", "north"), patience_s=SHORT_S)

    assert (enclave.came, enclave.frames) == (set(), [])


def test_the_owner_takes_no_other_key_for_the_enclaves_than_it_has_signed(listen, keys):
    signed = peer_from_certificate(
        (keys / "foreign" / ENCLAVE / "certificate.pem").read_bytes(), load_pem(keys, "foreign")
    )

    with pytest.raises(PeerRefusedError, match="its key differs from the enclave's certificate here"):
        listen().call(identity_of(keys / "own", OWNER), expected=signed)


def load_pem(keys, authority):
    return (keys / authority / "authority.pem").read_bytes()


def revocations(pki, observe, barred=()):
    return SplitRevocations((ENCLAVE, *CLIENTS), RevokedParties(pki).read_revocations, barred, observe)


@pytest.fixture
def pki(tmp_path):
    create_authority(tmp_path / "pki")
    for name in (ENCLAVE, *PARTIES, "stranger"):
        issue_certificate(tmp_path / "pki", name)
    return tmp_path / "pki"


@pytest.mark.parametrize("party", [ENCLAVE, *CLIENTS])
def test_a_revoked_party_is_asked_for_no_turn_and_the_log_says_why(pki, party):
    seen = []
    watch = revocations(pki, lambda kind, body: seen.append((kind, body)))
    RevokedParties(pki).revoke_party("stranger", "is in other runs")
    watch.check_revocations(3)
    RevokedParties(pki).revoke_party(party, "its keys were copied")

    for _ in range(2):
        with pytest.raises(PeerRefusedError, match=f"{party}: the certificate was revoked"):
            watch.check_revocations(4)

    ((kind, body),) = seen
    assert (kind, body["party"], body["step"], body["reason"]) == ("revoked", party, 4, "its keys were copied")


def test_a_party_that_the_log_names_stays_out_though_the_list_is_gone(pki):
    watch = revocations(pki, lambda kind, body: None, barred={"north"})

    with pytest.raises(PeerRefusedError, match="north"):
        watch.check_revocations(0)


def test_a_list_that_cannot_be_read_stops_the_run(pki):
    watch = revocations(pki, lambda kind, body: None)
    RevokedParties(pki).revoke_party("north", "")
    (pki / "revoked.json").write_text("{}x")

    with pytest.raises(CertificateError):
        watch.check_revocations(0)


def test_nothing_of_a_client_is_trained_once_its_certificate_is_revoked(source, tmp_path, pki):
    watch = revocations(pki, lambda kind, body: None)
    with RemoteHouse(source, tmp_path).open() as session:
        for name in CLIENTS:
            session.join(name)
        turns = RemoteTurns(4, 8)
        clients = RemoteClients(session.lead(), turns, watch.check_revocations)
        turns.next_batch()
        assert clients.train_turn(0, None)[0].loss > 0
        RevokedParties(pki).revoke_party("south", "its keys were copied")
        turns.next_batch()

        with pytest.raises(PeerRefusedError, match="south"):
            clients.train_turn(1, None)
        with pytest.raises(PeerRefusedError, match="south"):
            clients.measure_turn(1, ())

        assert session.server._trainer.num_steps == 1
