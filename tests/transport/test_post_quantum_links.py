"""Links and certificates against a quantum computer: the group that is negotiated, and who is refused without it."""

import contextlib
import shutil
import socket
import ssl
import threading
from dataclasses import replace

import pytest

from phalanx.errors import CertificateError, PeerLostError, PeerRefusedError, TransportError
from phalanx.security.crypto import create_authority, issue_certificate, load_identity, peer_from_certificate
from phalanx.transport import Endpoint, GrpcWire, TransportConfig, ask_peer_run
from phalanx.transport.tls_group import (
    HYBRID_GROUP,
    _chosen_group,
    check_hybrid_group,
    grpc_client_hello,
    negotiated_group,
)

OFFER = TransportConfig(timeout_s=20.0)
DEMAND = OFFER.model_copy(update={"post_quantum": "demand"})
X25519 = 0x001D


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """An authority of today, and one from before there were second keys, with two parties each."""
    home = tmp_path_factory.mktemp("pki")
    for kind in ("new", "old"):
        create_authority(home / kind)
        if kind == "old":
            (home / kind / "authority-ml-dsa-44.key").unlink()
        for name in ("owner", "worker"):
            issue_certificate(home / kind, name)
    return home


@contextlib.contextmanager
def served(identity, limits):
    wire = GrpcWire(identity, limits)
    with Endpoint(identity, {identity.name: identity.public}, "run-1", wire, limits):
        yield wire


@contextlib.contextmanager
def recorded(address):
    """Yield the address of a relay, and a list that gets what each end sent first."""
    host, port = address.rsplit(":", 1)
    first, lines, threads = {}, [], []

    def pump(source, sink, name):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                first.setdefault(name, data)
                sink.sendall(data)

    def start(target, *arguments):
        threads.append(threading.Thread(target=target, args=arguments))
        threads[-1].start()

    def relay():
        with contextlib.suppress(OSError):
            while True:
                lines.append(listener.accept()[0])
                lines.append(socket.create_connection((host, int(port))))
                start(pump, *lines[-2:], "client")
                start(pump, *reversed(lines[-2:]), "server")

    def end(sockets):
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        start(relay)
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}", first
        finally:
            # the relay ends first, and opens no further line
            end([listener])
            threads[0].join()
            end(lines)
            for thread in threads:
                thread.join()
            for line in lines:
                line.close()


@contextlib.contextmanager
def classical_server(home):
    """A TLS 1.3 server that knows no group but X25519."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(home / "certificate.pem", home / "tls.key")
    context.set_ecdh_curve("X25519")

    def answer():
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with contextlib.suppress(OSError), client:
                    context.wrap_socket(client, server_side=True)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, daemon=True).start()
        yield listener.getsockname()[1]


def test_a_recorded_link_of_two_parties_has_the_hybrid_group(keys):
    owner, worker = (load_identity(keys / "new" / name) for name in ("owner", "worker"))
    with served(owner, DEMAND) as wire, recorded(wire.address) as (address, first):
        assert ask_peer_run(worker, "owner", address, "127.0.0.1:1", OFFER).run == "run-1"

    assert _chosen_group(first["server"]) == HYBRID_GROUP
    assert first["client"].index(HYBRID_GROUP.to_bytes(2, "big")) > 0


def test_the_group_that_a_server_would_choose_is_seen_before_anything_is_sent(keys):
    worker = load_identity(keys / "new" / "worker")
    with served(load_identity(keys / "new" / "owner"), OFFER) as wire:
        host, port = wire.address.rsplit(":", 1)
        assert negotiated_group(host, int(port), grpc_client_hello(worker)) == HYBRID_GROUP
        check_hybrid_group(worker, host, int(port))
    with classical_server(keys / "new" / "owner") as port:
        assert negotiated_group("127.0.0.1", port, grpc_client_hello(worker)) == X25519


def test_a_server_without_the_hybrid_group_gets_no_frame_where_it_is_demanded(keys):
    worker = load_identity(keys / "new" / "worker")
    with classical_server(keys / "new" / "owner") as port:
        wire = GrpcWire(worker, DEMAND)
        wire.add_route("owner", f"127.0.0.1:{port}")
        with pytest.raises(TransportError, match="negotiates X25519 with this process, expected X25519MLKEM768"):
            wire.deliver_frame("owner", b"secret", 5.0)
        wire.close()


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x03\0\x02\x02\x28", b"\x16" * 300]
)
def test_what_is_no_server_hello_is_refused(keys, answer):
    def reply():
        client, _ = listener.accept()
        with client:
            client.recv(65536)
            client.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(PeerLostError):
            hello = grpc_client_hello(load_identity(keys / "new" / "worker"))
            negotiated_group("127.0.0.1", listener.getsockname()[1], hello)
        thread.join()


def test_parties_with_certificates_of_before_talk_where_nothing_is_demanded(keys):
    with served(load_identity(keys / "old" / "owner"), OFFER) as wire:
        answer = ask_peer_run(load_identity(keys / "old" / "worker"), "owner", wire.address, "127.0.0.1:1", OFFER)

    assert answer.run == "run-1"
    assert answer.peer.ml_dsa_key == b""


def test_classical_parties_are_refused_where_both_are_demanded(keys, tmp_path):
    old = load_identity(keys / "old" / "owner")
    with pytest.raises(CertificateError, match=r"has no ML-DSA-44 key, and transport.post_quantum demands one"):
        GrpcWire(old, DEMAND)
    # one party of the same authority, certified before that had a second key
    shutil.copytree(keys / "new", tmp_path / "mixed")
    (tmp_path / "mixed" / "authority-ml-dsa-44.key").unlink()
    shutil.rmtree(tmp_path / "mixed" / "worker")
    classical = load_identity(issue_certificate(tmp_path / "mixed", "worker"))
    owner = load_identity(keys / "new" / "owner")
    with served(owner, DEMAND) as wire, pytest.raises(PeerRefusedError, match="ML-DSA-44"):
        ask_peer_run(classical, "owner", wire.address, "127.0.0.1:1", OFFER)
    with served(classical, OFFER) as wire, pytest.raises(CertificateError, match="worker: its certificate has no"):
        ask_peer_run(owner, "worker", wire.address, "127.0.0.1:1", DEMAND)


def test_a_second_key_that_the_authority_did_not_sign_for_is_refused(keys, tmp_path):
    create_authority(tmp_path / "evil")
    shutil.copytree(keys / "new", tmp_path / "stolen")
    # somebody who can forge ECDSA has the first key of the authority, and not the second one
    shutil.copy(tmp_path / "evil" / "authority-ml-dsa-44.key", tmp_path / "stolen" / "authority-ml-dsa-44.key")
    shutil.rmtree(tmp_path / "stolen" / "worker")
    authority = (keys / "new" / "authority.pem").read_bytes()
    with pytest.raises(CertificateError, match="ML-DSA-44 key did not sign"):
        load_identity(issue_certificate(tmp_path / "stolen", "worker"))
    forged = (tmp_path / "stolen" / "worker" / "certificate.pem").read_bytes()
    with pytest.raises(CertificateError, match="ML-DSA-44 key did not sign"):
        peer_from_certificate(forged, authority)


def test_a_lost_or_exchanged_second_key_is_not_passed_over(keys, tmp_path):
    shutil.copytree(keys / "new", tmp_path / "k")
    key = tmp_path / "k" / "worker" / "signing-ml-dsa-44.key"
    shutil.copy(tmp_path / "k" / "owner" / key.name, key)
    with pytest.raises(CertificateError, match=r"is not the ML-DSA-44 key in certificate.pem"):
        load_identity(tmp_path / "k" / "worker")
    key.unlink()
    with pytest.raises(CertificateError, match=r"is not the ML-DSA-44 key in certificate.pem"):
        load_identity(tmp_path / "k" / "worker")


def test_both_signatures_must_hold_and_neither_can_be_left_out(keys):
    owner = load_identity(keys / "new" / "owner")
    fields = owner.signature_fields(b"data")
    owner.public.verify_fields(fields, b"data")
    with pytest.raises(Exception, match="does not match"):
        owner.public.verify_fields(fields, b"datb")
    for name in fields:
        with pytest.raises(Exception, match="does not match"):
            owner.public.verify_fields({**fields, name: ""}, b"data")
        wrong = {**fields, name: fields[name][:-2] + ("00" if fields[name][-2:] != "00" else "01")}
        with pytest.raises(Exception, match="does not match"):
            owner.public.verify_fields(wrong, b"data")
    old = replace(owner.public, ml_dsa_key=b"")
    old.verify_fields({"signature": fields["signature"]}, b"data")
