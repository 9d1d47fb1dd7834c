"""Joining by a token: over real TLS on this machine, with attackers that hold some of what it takes."""

import contextlib
import json
import socket
import ssl
import stat
import threading
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config import canonical_json
from phalanx.errors import CertificateError, ConfigError, FrameError, PeerGoneError, PeerRefusedError
from phalanx.security.crypto import (
    HybridSealKey,
    certificate_fingerprint,
    create_authority,
    issue_certificate,
    load_identity,
    make_request,
)
from phalanx.security.invite import EnrolmentServer, Invitations, JoinTerms, JoinToken, enrol_machine
from phalanx.security.invite import client as clients
from phalanx.security.invite.line import MAX_BYTES, client_context, server_context
from phalanx.security.invite.token import secret_purpose

DAY = timedelta(days=1)


class Clock:
    """The owner's time of day."""

    def __init__(self):
        self.moment = datetime.now(UTC)

    def __call__(self):
        return self.moment


class Owner:
    """An owner's machine: authority, register and endpoint."""

    def __init__(self, directory):
        self.directory, self.said, self.clock, self.seconds = directory, [], Clock(), 0.0
        create_authority(directory)
        issue_certificate(directory, "owner")
        self.invitations = Invitations(directory, self.clock)
        terms = JoinTerms(7070, ("serve a stage", "\x1b[31mred"))
        self.server = EnrolmentServer(directory, self.invitations, terms, self.said.append, lambda: self.seconds)
        self.server.start_listening("127.0.0.1", 0)

    def invite(self, name="alice", lasts=DAY):
        return self.invitations.invite_party(name, f"127.0.0.1:{self.server.port}", lasts)


@pytest.fixture
def owner(tmp_path):
    owner = Owner(tmp_path / "keys")
    with owner.server:
        yield owner


def changed(token, **fields):
    return JoinToken(**{name: fields.get(name, getattr(token, name)) for name in JoinToken.__annotations__})


def test_from_a_token_a_machine_has_an_identity_and_the_owner_no_key_of_it(owner, tmp_path):
    token = JoinToken.from_text(owner.invite().to_text())

    told = enrol_machine(token, tmp_path / "alice")

    assert load_identity(tmp_path / "alice").name == "alice"
    assert sorted(path.name for path in (owner.directory / "alice").iterdir()) == ["authority.pem", "certificate.pem"]
    assert (told.owner, told.own_host) == ("127.0.0.1:7070", "127.0.0.1")
    assert told.asks == ("serve a stage", "?[31mred")
    assert owner.said == ["alice has made its keys at 127.0.0.1 and is certified"]
    assert owner.invitations.open_names() == []


def test_the_owner_keeps_a_hash_of_the_secret_alone_in_a_private_file(owner):
    token = owner.invite()

    files = [path for path in owner.directory.rglob("*") if path.is_file()]
    kept = owner.directory / "invitations" / "alice.json"

    assert kept in files
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert not [path for path in files if token.secret.encode() in path.read_bytes()]


def test_whose_answer_was_lost_asks_again_with_the_same_keys(owner, tmp_path):
    token = owner.invite()
    enrol_machine(token, tmp_path / "alice")
    before = (tmp_path / "alice" / "certificate.pem").read_bytes()

    enrol_machine(token, tmp_path / "alice")

    assert (tmp_path / "alice" / "certificate.pem").read_bytes() == before


def test_a_stolen_token_is_refused_and_both_sides_learn_of_it(owner, tmp_path):
    token = owner.invite()
    enrol_machine(token, tmp_path / "thief")

    with pytest.raises(PeerRefusedError, match="was used already, with other keys than these"):
        enrol_machine(token, tmp_path / "alice")

    assert "used already" in owner.said[-1]
    assert not (tmp_path / "alice" / "certificate.pem").exists()


def test_a_wrong_token_is_refused_whether_its_name_is_invited_or_not(owner, tmp_path):
    token = owner.invite()

    for name in ("alice", "bob"):
        with pytest.raises(PeerRefusedError, match="is not valid here"):
            enrol_machine(changed(token, name=name, secret="0" * 64), tmp_path / name)

    assert not (owner.directory / "alice").exists()
    assert owner.invitations.open_names() == ["alice"]


def test_a_token_counts_for_its_own_name_only(owner, tmp_path):
    alice, bob = owner.invite("alice"), owner.invite("bob")

    with pytest.raises(PeerRefusedError, match="is not valid here"):
        enrol_machine(changed(bob, secret=alice.secret), tmp_path / "bob")


def test_a_request_of_another_name_is_refused_and_the_token_stays_good(owner, tmp_path):
    token = owner.invite()

    with pytest.raises(CertificateError, match="is of 'owner-2', expected 'alice'"):
        owner.invitations.admit_party("alice", token.secret, make_request(tmp_path / "mallory", "owner-2"))

    enrol_machine(token, tmp_path / "alice")


def test_an_expired_token_is_refused_and_one_a_second_before_is_not(owner, tmp_path):
    early, late = owner.invite("alice", timedelta(hours=1)), owner.invite("bob", timedelta(hours=1))
    owner.clock.moment = early.expires_at - timedelta(seconds=1)
    enrol_machine(early, tmp_path / "alice")

    owner.clock.moment = late.expires_at

    with pytest.raises(PeerRefusedError, match="has expired"):
        enrol_machine(late, tmp_path / "bob")
    assert owner.invitations.open_names() == []


def test_a_newer_token_replaces_the_older_one(owner, tmp_path):
    old, new = owner.invite(), owner.invite()

    with pytest.raises(PeerRefusedError, match="a newer one has replaced it"):
        enrol_machine(old, tmp_path / "alice")
    enrol_machine(new, tmp_path / "alice")


def test_a_party_that_is_certified_is_invited_to_a_further_run_and_its_own_keys_alone_are_let_in(owner, tmp_path):
    enrol_machine(owner.invite(), tmp_path / "alice")
    before = (tmp_path / "alice" / "certificate.pem").read_bytes()

    # whoever has stolen the second token has other keys
    with pytest.raises(PeerRefusedError, match="certified with other keys already"):
        enrol_machine(owner.invite(), tmp_path / "thief")
    enrol_machine(owner.invite(), tmp_path / "alice")

    assert (tmp_path / "alice" / "certificate.pem").read_bytes() == before
    assert not (tmp_path / "thief" / "certificate.pem").exists()


class Impostor:
    """A TLS server that stands where the token points to; it answers all it is asked, and keeps what it hears."""

    def __init__(self, home, authority):
        self.heard, self._authority, self.seal_key = [], authority, HybridSealKey.generate()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._context = server_context(home)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            connection = self._listener.accept()[0]
            try:
                with self._context.wrap_socket(connection, server_side=True) as secure:
                    while line := secure.recv(65536):
                        self.heard.append(line)
                        secure.sendall(
                            canonical_json({"authority": self._authority, "seal": self.seal_key.public_bytes.hex()})
                            + b"\n"
                        )
            except OSError:
                connection.close()


def test_another_authority_at_the_address_is_not_told_the_secret(owner, tmp_path):
    create_authority(tmp_path / "evil")
    home = issue_certificate(tmp_path / "evil", "owner")
    impostor = Impostor(home, (tmp_path / "evil" / "authority.pem").read_text())
    token = changed(owner.invite(), address=impostor.address)

    with pytest.raises(CertificateError, match="has another authority than the token names"):
        enrol_machine(token, tmp_path / "alice")

    assert impostor.heard == [b'{"ask":"authority"}\n']


def test_who_shows_the_right_authority_without_a_certificate_of_it_is_not_told_the_secret(owner, tmp_path):
    create_authority(tmp_path / "evil")
    home = issue_certificate(tmp_path / "evil", "owner")
    impostor = Impostor(home, (owner.directory / "authority.pem").read_text())
    token = changed(owner.invite(), address=impostor.address)

    with pytest.raises(PeerRefusedError, match="is not the owner of this authority"):
        enrol_machine(token, tmp_path / "alice")

    assert impostor.heard == [b'{"ask":"authority"}\n']


def test_another_worker_of_the_same_authority_cannot_play_the_owner(owner, tmp_path):
    home = issue_certificate(owner.directory, "mallory")
    impostor = Impostor(home, (owner.directory / "authority.pem").read_text())
    token = changed(owner.invite(), address=impostor.address)

    with pytest.raises(PeerRefusedError, match="is not the owner of this authority"):
        enrol_machine(token, tmp_path / "alice")

    assert impostor.heard == [b'{"ask":"authority"}\n']


def test_with_the_check_of_the_authority_off_the_same_impostor_is_told_the_secret(owner, tmp_path, monkeypatch):
    create_authority(tmp_path / "evil")
    home = issue_certificate(tmp_path / "evil", "owner")
    impostor = Impostor(home, (tmp_path / "evil" / "authority.pem").read_text())
    token = changed(owner.invite(), address=impostor.address)
    monkeypatch.setattr(clients.hmac, "compare_digest", lambda one, other: True)

    with pytest.raises(FrameError, match="certificate: missing"):
        enrol_machine(token, tmp_path / "alice")

    sealed = bytes.fromhex(json.loads(impostor.heard[-1])["sealed"])
    assert impostor.seal_key.open_sealed(sealed, secret_purpose(token.name)) == token.secret.encode()


def test_the_secret_is_not_in_what_tls_carries_nor_open_to_who_exchanges_the_key(owner, tmp_path, monkeypatch):
    questions, other = [], HybridSealKey.generate()
    ask = clients._ask_owner

    def listen(connection, question):
        questions.append(question)
        answer = ask(connection, question)
        return answer | ({"seal": other.public_bytes.hex()} if "seal" in answer else {})

    token = owner.invite()
    monkeypatch.setattr(clients, "_ask_owner", listen)

    with pytest.raises(PeerRefusedError, match="not sealed for this owner"):
        enrol_machine(token, tmp_path / "alice")

    assert token.secret not in json.dumps(questions)


def test_wrong_tokens_of_a_neighbour_at_the_same_address_keep_nobody_out(owner, tmp_path):
    token = owner.invite()
    wrong = [changed(token, secret="0" * 64), changed(token, name="bob"), changed(token, name="mallory")]
    for number in range(9):
        with pytest.raises(PeerRefusedError, match="is not valid here"):
            enrol_machine(wrong[number % 3], tmp_path / wrong[number % 3].name)

    enrol_machine(token, tmp_path / "alice2")

    assert load_identity(tmp_path / "alice2").name == "alice"
    # a terminal cannot be filled with one refusal
    assert len([line for line in owner.said if "is refused" in line]) == 1


def talk(owner, raw):
    """What the endpoint answers to raw bytes after a TLS handshake."""
    plain = socket.create_connection(("127.0.0.1", owner.server.port), timeout=30)
    with client_context(None).wrap_socket(plain) as secure:
        try:
            secure.sendall(raw)
            return secure.recv(65536)
        except OSError:
            return b""


@pytest.mark.parametrize(
    "raw",
    [
        b"\n",
        b"[]\n",
        b"GET / HTTP/1.1\n",
        b'{"ask": "authority"}\n',
        b"x" * (MAX_BYTES + 10),
        b"\xff\n",
    ],
    ids=["empty", "list", "http", "not canonical", "long", "not utf-8"],
)
def test_what_is_no_question_gets_no_answer_and_ends_nothing(owner, tmp_path, raw):
    assert talk(owner, raw) == b""

    enrol_machine(owner.invite(), tmp_path / "alice")


@pytest.mark.parametrize(
    "question",
    [
        b'{"name":"alice"}\n',
        b'{"name":"../alice","request":"","secret":""}\n',
        b'{"name":7,"request":"","secret":""}\n',
        b'{"name":"alice","request":"","secret":"\\u001b[2J"}\n',
    ],
)
def test_a_malformed_question_is_refused_in_words(owner, question):
    owner.invite()

    assert b"refused" in talk(owner, question)
    assert all(line.isprintable() for line in owner.said)


def test_older_tls_is_not_spoken(owner):
    context = client_context(None)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    plain = socket.create_connection(("127.0.0.1", owner.server.port), timeout=30)
    with plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain)


def idle_connection(owner, number, spread):
    source = (f"127.0.{1 + number // 250}.{1 + number % 250}" if spread else "127.0.0.1", 0)
    return socket.create_connection(("127.0.0.1", owner.server.port), timeout=30, source_address=source)


@pytest.mark.quick_cases("silent-one?address", "in?the?middle*many*")
@pytest.mark.parametrize("spread", [False, True], ids=["one address", "many addresses"])
@pytest.mark.parametrize("words", [b"", b"\x16\x03\x01"], ids=["silent", "in the middle of a handshake"])
def test_idle_connections_keep_no_caller_out(owner, tmp_path, spread, words):
    idle = [idle_connection(owner, number, spread) for number in range(200)]
    for connection in idle:
        with contextlib.suppress(OSError):
            connection.sendall(words)

    enrol_machine(owner.invite(), tmp_path / "alice")

    assert load_identity(tmp_path / "alice").name == "alice"
    for connection in idle:
        connection.close()


def test_callers_that_are_silent_after_their_handshake_keep_nobody_out_either(owner, tmp_path):
    idle = []
    for number in range(70):
        plain = idle_connection(owner, number, spread=True)
        idle.append(client_context(None).wrap_socket(plain))

    enrol_machine(owner.invite(), tmp_path / "alice")

    assert load_identity(tmp_path / "alice").name == "alice"
    for connection in idle:
        connection.close()


def test_who_connects_again_and_again_while_a_caller_speaks_keeps_it_not_out(owner, tmp_path):
    ended, held = threading.Event(), []

    def flood():
        while not ended.is_set():
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", owner.server.port), 30, ("127.0.0.9", 0)))
            if len(held) > 300:
                held.pop(0).close()

    flooder = threading.Thread(target=flood)
    flooder.start()
    try:
        enrol_machine(owner.invite(), tmp_path / "alice")
    finally:
        ended.set()
        flooder.join()
        for connection in held:
            connection.close()

    assert load_identity(tmp_path / "alice").name == "alice"


def is_cut(connection):
    with connection:
        try:
            return connection.recv(1) == b""
        except ConnectionResetError:
            return True


def test_an_endpoint_closes_at_once_where_callers_are_idle(owner):
    idle = [idle_connection(owner, number, spread=True) for number in range(5)]

    owner.server.close()

    assert all(is_cut(connection) for connection in idle)


def test_a_clock_that_is_wrong_is_named_and_the_token_stays_good(owner, tmp_path, monkeypatch):
    token, real = owner.invite(), clients.steady_now
    monkeypatch.setattr(clients, "steady_now", lambda: real() + timedelta(minutes=10))

    with pytest.raises(CertificateError, match="this machine's clock is 600 s ahead of the owner's"):
        enrol_machine(token, tmp_path / "alice")
    monkeypatch.setattr(clients, "steady_now", real)

    # whole seconds, and a busy machine lets one go by
    assert abs(enrol_machine(token, tmp_path / "alice").skew_s) < 60


def test_where_nothing_listens_the_message_says_what_should(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    token = JoinToken.with_fresh_secret("alice", f"127.0.0.1:{port}", "0" * 64, datetime.now(UTC))

    with pytest.raises(PeerGoneError, match="is the owner's `phalanx invite` running"):
        enrol_machine(token, tmp_path / "alice")


def test_an_endpoint_that_closes_finishes_its_answers_first(owner, tmp_path, monkeypatch):
    closing, certified = [], owner.invitations.admit_party

    def admit(*asked):
        home = certified(*asked)
        closing.append(threading.Thread(target=owner.server.close))
        closing[0].start()
        return home

    monkeypatch.setattr(owner.invitations, "admit_party", admit)

    enrol_machine(owner.invite(), tmp_path / "alice")

    closing[0].join()
    assert load_identity(tmp_path / "alice").name == "alice"


LINE = JoinToken.with_fresh_secret(
    "alice", "owner.example.org:7070", "ab" * 32, datetime(2030, 1, 1, tzinfo=UTC)
).to_text()


def test_a_token_is_one_line_without_anything_a_shell_would_read():
    assert JoinToken.from_text(f"  {LINE}\n").to_text() == LINE
    assert len(LINE) < 500
    assert LINE.replace("-", "").replace("_", "").isalnum()


def test_a_token_does_not_show_its_secret_when_it_is_printed():
    assert JoinToken.from_text(LINE).secret not in repr(JoinToken.from_text(LINE))


@given(st.integers(0, len(LINE) - 1), st.sampled_from("abcXYZ019-_ \n=."))
def test_no_changed_character_of_a_token_passes(place, other):
    altered = LINE[:place] + other + LINE[place + 1 :]
    if altered.strip() == LINE:
        return

    try:
        read = JoinToken.from_text(altered)
    except (ConfigError, CertificateError):
        return
    # the last character has bits that stand for nothing
    assert read == JoinToken.from_text(LINE)


@given(st.integers(0, len(LINE) - 1))
def test_a_token_that_is_cut_is_refused(length):
    with pytest.raises(ConfigError, match="token"):
        JoinToken.from_text(LINE[:length])


@given(st.text(max_size=300))
def test_any_text_at_all_is_refused_as_a_token(text):
    for line in (text, f"phx1-{text}"):
        with pytest.raises(ConfigError):
            JoinToken.from_text(line)


@pytest.mark.parametrize("address", ["owner", "owner:", "owner:0", "owner:70000", ":7070", "a b:1", "owner:7070:1"])
def test_an_address_without_host_or_port_is_refused(address):
    with pytest.raises(ConfigError, match="expected host:port"):
        JoinToken.with_fresh_secret("alice", address, "0" * 64, datetime.now(UTC))


def test_the_fingerprint_in_a_token_is_that_of_the_authority(owner):
    assert owner.invite().authority == certificate_fingerprint((owner.directory / "authority.pem").read_bytes())
