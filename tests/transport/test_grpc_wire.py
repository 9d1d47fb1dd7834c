"""Real sockets: which party gets in, which does not, and what crosses."""

import contextlib
import socket
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from made_frames import frame_bytes, header_values, refusal

from phalanx.errors import CertificateError, PeerGoneError, PeerLostError, PeerRefusedError, RoleError, TransportError
from phalanx.security.crypto import (
    Identity,
    certificate,
    clock,
    create_authority,
    issue_certificate,
    load_authority,
    load_identity,
    peer_from_certificate,
)
from phalanx.transport import Endpoint, GrpcWire, TransportConfig, ask_peer_run, grpc_wire
from phalanx.transport.grpc_tls import grpc

LIMITS = TransportConfig(timeout_s=10.0, max_frame_bytes=16 * 2**20, max_queued_bytes=32 * 2**20)
QUICK = LIMITS.model_copy(update={"timeout_s": 8.0})
NOW = datetime.now(UTC)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """One authority with three parties, and a foreign authority with one."""
    directory = tmp_path_factory.mktemp("pki")
    create_authority(directory / "keys", now=NOW - timedelta(days=20))
    create_authority(directory / "foreign")
    for name in ("owner", "worker", "mallory"):
        issue_certificate(directory / "keys", name)
    issue_certificate(directory / "foreign", "worker")
    return directory


@pytest.fixture
def identities(keys):
    return {name: load_identity(keys / "keys" / name) for name in ("owner", "worker", "mallory")}


@pytest.fixture
def opened():
    """Closes whatever a test opens."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def join(identities, opened):
    """Make an endpoint on a socket of its own."""
    peers = {name: identity.public for name, identity in identities.items()}

    def make(name, limits=LIMITS):
        wire = GrpcWire(identities[name], limits)
        endpoint = opened.enter_context(Endpoint(identities[name], peers, "run-1", wire, limits))
        endpoint.wire = wire
        return endpoint

    return make


@pytest.fixture
def owner(join):
    return join("owner")


def probe(identity, owner, raw, party="owner"):
    """Deliver one frame as this identity, once."""
    wire = GrpcWire(identity, QUICK)
    try:
        wire.add_route(party, owner.wire.address)
        return wire.deliver_frame(party, raw, 8.0)
    finally:
        wire.close()


def identity_from(directory, name, now=None):
    return load_identity(directory / name, now)


def test_frames_cross_both_ways_and_are_signed_for(join, owner, identities):
    worker = join("worker")
    owner.add_peer(identities["worker"].public, worker.wire.address)
    worker.add_peer(identities["owner"].public, owner.wire.address)
    payload = bytes(range(256)) * 40_000

    sent = worker.send_frame("owner", "activation", {"step": 1}, [payload])
    received = owner.receive_item(10.0)
    owner.send_frame("worker", "gradient", {"step": 1})

    assert received.payload == payload
    assert worker.receive_item(10.0).kind == "gradient"
    worker.receipts.wait_for_proof(sent.header_digest, 10.0).verify_arrival(identities["owner"].public)


def test_a_right_certificate_gets_in(owner, identities):
    answer = probe(identities["worker"], owner, frame_bytes(identities["worker"], header_values()))

    assert refusal(answer) == ""


def test_a_client_without_certificate_never_reaches_the_endpoint(owner, keys, identities):
    root = load_authority(keys / "keys" / "authority.pem")
    options = [("grpc.ssl_target_name_override", "owner.phalanx.internal"), ("grpc.enable_http_proxy", 0)]
    credentials = grpc.ssl_channel_credentials(root)
    with grpc.secure_channel(owner.wire.address, credentials, options=options) as channel:
        call = channel.unary_unary("/phalanx.Transport/Deliver")
        with pytest.raises(grpc.RpcError):
            call(frame_bytes(identities["worker"], header_values()), timeout=8.0)

    assert owner.receive_item(0.0) is None
    assert not owner.refusal_counts


def test_a_client_without_tls_never_reaches_the_endpoint(owner, identities):
    with grpc.insecure_channel(owner.wire.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.unary_unary("/phalanx.Transport/Deliver")
        with pytest.raises(grpc.RpcError):
            call(frame_bytes(identities["worker"], header_values()), timeout=8.0)

    assert not owner.refusal_counts


def test_a_client_of_a_foreign_authority_never_reaches_the_endpoint(owner, keys):
    foreign = identity_from(keys / "foreign", "worker")
    # it even trusts our authority, so that only the server can refuse
    trusting = Identity(
        "worker",
        foreign.signing_key,
        foreign.tls_key_pem,
        foreign.certificate_pem,
        load_authority(keys / "keys" / "authority.pem"),
    )

    with pytest.raises((PeerLostError, PeerRefusedError)):
        probe(trusting, owner, frame_bytes(foreign, header_values()))
    assert not owner.refusal_counts


def test_a_server_of_a_foreign_authority_is_sent_nothing(owner, keys):
    foreign = identity_from(keys / "foreign", "worker")

    with pytest.raises(PeerRefusedError, match="owner"):
        probe(foreign, owner, frame_bytes(foreign, header_values()))


@pytest.mark.parametrize(
    ("name", "issued_at"), [("expired", NOW - timedelta(days=10)), ("future", NOW + timedelta(days=10))]
)
def test_a_certificate_outside_its_days_never_reaches_the_endpoint(owner, keys, name, issued_at):
    issue_certificate(keys / "keys", name, days=5, now=issued_at)
    identity = identity_from(keys / "keys", name, issued_at)

    with pytest.raises((PeerLostError, PeerRefusedError)):
        probe(identity, owner, frame_bytes(identity, header_values(sender=name)))
    assert not owner.refusal_counts


def test_a_server_with_another_partys_certificate_is_sent_nothing(owner, identities):
    raw = frame_bytes(identities["worker"], header_values(receiver="mallory"))

    with pytest.raises(PeerRefusedError, match="mallory"):
        probe(identities["worker"], owner, raw, party="mallory")
    assert not owner.refusal_counts


def test_a_party_that_speaks_in_anothers_name_is_refused(owner, identities):
    answer = probe(identities["mallory"], owner, frame_bytes(identities["worker"], header_values()))

    assert refusal(answer) == "PeerRefusedError"
    assert owner.refusal_counts == {"mallory": 1}


def test_a_certified_party_that_nobody_announced_is_refused(owner, keys):
    issue_certificate(keys / "keys", "stranger")
    stranger = identity_from(keys / "keys", "stranger")

    answer = probe(stranger, owner, frame_bytes(stranger, header_values(sender="stranger")))

    assert refusal(answer) == "PeerRefusedError"


def test_an_evicted_party_is_refused(owner, identities):
    owner.evict_party("worker")

    answer = probe(identities["worker"], owner, frame_bytes(identities["worker"], header_values()))

    assert refusal(answer) == "PeerRefusedError"


def tls_client(keys, name, version):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = context.maximum_version = version
    context.load_verify_locations(keys / "keys" / "authority.pem")
    context.load_cert_chain(keys / "keys" / name / "certificate.pem", keys / "keys" / name / "tls.key")
    context.set_alpn_protocols(["h2"])
    return context


def shake_hands(context, address):
    host, port = address.rsplit(":", 1)
    with (
        socket.create_connection((host, int(port)), timeout=5.0) as raw,
        context.wrap_socket(raw, server_hostname="owner.phalanx.internal") as secured,
    ):
        # the server's HTTP/2 settings: it has accepted our certificate
        return secured.version(), secured.recv(9)


def test_tls_1_3_with_a_valid_certificate_gets_through(owner, keys):
    version, settings = shake_hands(tls_client(keys, "worker", ssl.TLSVersion.TLSv1_3), owner.wire.address)

    assert version == "TLSv1.3"
    assert settings


def test_tls_1_2_is_refused_although_the_certificate_is_valid(owner, keys):
    with pytest.raises((ssl.SSLError, ConnectionResetError)):
        shake_hands(tls_client(keys, "worker", ssl.TLSVersion.TLSv1_2), owner.wire.address)


def test_a_client_sends_nothing_to_a_server_that_knows_only_tls_1_2(keys, identities):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(keys / "keys" / "owner" / "certificate.pem", keys / "keys" / "owner" / "tls.key")
    outcomes = []

    def serve_once(listening):
        connection, _ = listening.accept()
        try:
            context.wrap_socket(connection, server_side=True).close()
            outcomes.append("agreed")
        except OSError as error:
            outcomes.append(str(error))
        finally:
            connection.close()

    wire = GrpcWire(identities["worker"], QUICK)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = threading.Thread(target=serve_once, args=(listening,))
        server.start()
        wire.add_route("owner", f"127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(PeerLostError):
            wire.deliver_frame("owner", b"secret", 8.0)
        server.join(120.0)
    wire.close()

    assert len(outcomes) == 1
    assert outcomes[0] != "agreed"


def test_a_server_that_would_accept_tls_1_2_does_not_start(keys):
    code = (
        "import grpc, sys; from pathlib import Path\n"
        "from phalanx.security.crypto import load_identity\n"
        "from phalanx.transport import Endpoint, GrpcWire, TransportConfig\n"
        "identity, limits = load_identity(Path(sys.argv[1])), TransportConfig()\n"
        "try: Endpoint(identity, {}, 'run-1', GrpcWire(identity, limits), limits)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )

    result = subprocess.run(
        [sys.executable, "-c", code, str(keys / "keys" / "owner")],
        capture_output=True, text=True, timeout=60, check=True, env={"GRPC_VERBOSITY": "NONE"},
    )  # fmt: skip

    assert result.stdout.startswith("TransportError")
    assert "agrees to TLS 1.2" in result.stdout


def test_who_joins_learns_the_run_and_makes_itself_known(owner, identities):
    met = ask_peer_run(identities["worker"], "owner", owner.wire.address, "10.0.0.7:4711", QUICK, begins=True)

    assert met.run == "run-1"
    assert met.peer == identities["owner"].public
    joined = owner.wire.wait_joined("worker", 5.0)
    assert joined.address == "10.0.0.7:4711"
    assert joined.peer == identities["worker"].public
    assert owner.wire.wait_joined("nobody", 0.0) is None


def test_who_only_looks_which_run_is_served_has_not_joined(owner, identities):
    met = ask_peer_run(identities["worker"], "owner", owner.wire.address, "10.0.0.7:4711", QUICK)

    assert met.run == "run-1"
    assert owner.wire.wait_joined("worker", 0.0) is None


def test_calls_of_a_party_without_the_role_are_refused_by_its_key(owner, identities):
    asked = []

    def admit(call, name, key):
        asked.append((call, name, key))
        raise RoleError("worker has no role here")

    owner.wire.admit = admit
    with pytest.raises(PeerRefusedError, match="worker has no role here"):
        ask_peer_run(identities["worker"], "owner", owner.wire.address, config=QUICK)
    with pytest.raises(PeerRefusedError):
        probe(identities["worker"], owner, frame_bytes(identities["worker"], header_values()))

    assert asked == [(call, "worker", identities["worker"].fingerprint) for call in ("Describe", "Deliver")]
    assert owner.receive_item(0.0) is None


def test_who_joins_learns_what_it_is_called_and_waits_until_that_is_known(owner, identities):
    asked = []

    def name_of(certified, begins):
        asked.append((certified, begins))
        return None if len(asked) == 1 else f"{certified}.2"

    owner.wire.name_of = name_of
    met = ask_peer_run(identities["worker"], "owner", owner.wire.address, config=LIMITS, begins=True)

    assert met.calls_us == "worker.2"
    assert asked == [("worker", True), ("worker", True)]


def test_who_may_not_come_back_is_told_so(owner, identities):
    def name_of(certified, begins):
        raise PeerRefusedError("worker was excluded and may not come back")

    owner.wire.name_of = name_of

    with pytest.raises(PeerRefusedError, match="may not come back"):
        ask_peer_run(identities["worker"], "owner", owner.wire.address, config=LIMITS)


def test_who_joins_looks_for_an_owner_that_does_not_listen_yet(identities, opened):
    # held by a socket that never listens, so that nobody else is given the port meanwhile; gRPC may bind it as well
    closed = opened.enter_context(socket.socket())
    closed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    closed.bind(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    hasty = LIMITS.model_copy(update={"timeout_s": 0.2})
    ask = partial(ask_peer_run, identities["worker"], "owner", f"127.0.0.1:{port}", config=hasty)
    with pytest.raises(PeerLostError):
        ask()
    with ThreadPoolExecutor(1) as pool:
        met = pool.submit(ask, patience_s=60.0)
        with pytest.raises(TimeoutError):
            met.result(1.0)

        wire = GrpcWire(identities["owner"], LIMITS.model_copy(update={"port": port}))
        opened.enter_context(Endpoint(identities["owner"], {}, "run-1", wire, LIMITS))

        assert met.result(60.0).run == "run-1"


def test_who_asks_for_another_party_is_told_nothing(owner, identities):
    with pytest.raises((PeerRefusedError, PeerLostError)):
        ask_peer_run(identities["worker"], "mallory", owner.wire.address, config=QUICK)


@pytest.mark.parametrize("question", [b"", b"[]", b"{}", b'{"address":1}', b'{"address":"' + b"x" * 400 + b'"}'])
def test_a_malformed_question_is_refused(owner, identities, question):
    from phalanx.transport.grpc_tls import open_channel

    with open_channel(identities["worker"], "owner", owner.wire.address, QUICK) as channel:
        call = channel.unary_unary("/phalanx.Transport/Describe")
        with pytest.raises(grpc.RpcError) as caught:
            call(question, timeout=60.0)

    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert owner.wire.wait_joined("worker", 0.0) is None


def test_an_over_long_message_is_refused_before_it_is_handled(owner, identities):
    from phalanx.transport.grpc_tls import open_channel

    large = LIMITS.model_copy(update={"max_frame_bytes": 64 * 2**20})
    with open_channel(identities["worker"], "owner", owner.wire.address, large) as channel:
        call = channel.unary_unary("/phalanx.Transport/Deliver")
        with pytest.raises(grpc.RpcError):
            call(bytes(20 * 2**20), timeout=10.0)

    assert not owner.refusal_counts
    assert refusal(probe(identities["worker"], owner, frame_bytes(identities["worker"], header_values()))) == ""


def test_noise_on_the_port_does_not_stop_the_server(owner, identities):
    host, port = owner.wire.address.rsplit(":", 1)
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(500), bytes(5000)):
        with socket.create_connection((host, int(port)), timeout=5.0) as raw:
            raw.sendall(noise)

    assert refusal(probe(identities["worker"], owner, frame_bytes(identities["worker"], header_values()))) == ""


def test_a_restarted_connection_is_found_again(join, owner, identities):
    worker = join("worker")
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    owner.add_peer(identities["mallory"].public, f"127.0.0.1:{port}")
    owner.send_frame("mallory", "activation", {})

    late = join("mallory", LIMITS.model_copy(update={"port": port}))

    assert late.receive_item(10.0).kind == "activation"
    assert worker.receive_item(0.0) is None


def test_where_a_process_has_ended_the_error_says_that_nobody_listens(join, owner, identities):
    address = owner.wire.address
    owner.close()
    wire = GrpcWire(identities["worker"], QUICK)
    try:
        wire.add_route("owner", address)
        with pytest.raises(PeerGoneError):
            wire.deliver_frame("owner", b"", 8.0)
    finally:
        wire.close()


def test_a_wall_clock_that_jumps_shuts_nobody_out_who_is_in(join, owner, identities, monkeypatch):
    worker = join("worker")
    worker.wire.add_route("owner", owner.wire.address)
    worker.send_frame("owner", "activation", {})
    assert owner.receive_item(8.0).kind == "activation"

    class Jumped(datetime):
        @classmethod
        def now(cls, tz=None):
            return NOW + timedelta(days=10_000)

    for module in (grpc_wire, certificate, clock):
        monkeypatch.setattr(module, "datetime", Jumped)
    worker.send_frame("owner", "activation", {})

    assert owner.receive_item(8.0).kind == "activation"
    assert worker.receive_item(0.0) is None
    assert peer_from_certificate(identities["worker"].certificate_pem, identities["worker"].authority_pem)


def test_a_party_without_address_is_lost_after_the_deadline(join, identities):
    worker = join("worker", LIMITS.model_copy(update={"timeout_s": 0.2}))

    worker.send_frame("owner", "activation", {})

    assert isinstance(worker.receive_item(5.0).error, PeerLostError)


def test_a_taken_port_is_our_error(owner, identities):
    port = int(owner.wire.address.rsplit(":", 1)[1])

    with pytest.raises(TransportError, match="cannot listen"):
        GrpcWire(identities["worker"], LIMITS.model_copy(update={"port": port}))


def test_a_port_on_which_nobody_was_served_is_free_again_once_it_is_closed(identities):
    # a worker that has looked for its owner in vain looks again, from the same port
    wire = GrpcWire(identities["owner"], TransportConfig())
    port = int(wire.address.rpartition(":")[2])
    wire.close()
    wire.close()

    again = GrpcWire(identities["owner"], TransportConfig(port=port))

    assert again.address == wire.address
    again.close()


def test_an_identity_without_certificate_cannot_go_online():
    with pytest.raises(CertificateError, match="no certificate"):
        GrpcWire(Identity.without_certificate("worker"), LIMITS)


def test_a_sender_blocked_at_a_full_inbox_does_not_starve_another(join, identities):
    limits = LIMITS.model_copy(update={"max_queued_bytes": 2**20})
    owner, worker, mallory = join("owner", limits), join("worker"), join("mallory")
    for sender in (worker, mallory):
        sender.add_peer(identities["owner"].public, owner.wire.address)
    for _ in range(6):
        mallory.send_frame("owner", "activation", {}, [bytes(900_000)])

    sent = worker.send_frame("owner", "activation", {}, [bytes(900_000)])

    assert worker.receipts.wait_for_proof(sent.header_digest, 10.0)
    assert len(mallory.receipts) < 6
