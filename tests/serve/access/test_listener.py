"""TLS of a server whose clients must show certificates."""

import contextlib
import ssl

import pytest

from phalanx.security.crypto import create_authority, issue_certificate
from phalanx.serve.access.listener import ListenConfig, make_server
from phalanx.serve.access.request_bounds import RequestBounds


@pytest.fixture
def pki(tmp_path):
    create_authority(tmp_path / "pki")
    for name in ("gateway", "client"):
        issue_certificate(tmp_path / "pki", name)
    return tmp_path / "pki"


def shake_hands(server_context, client_context, session=None):
    """Lead one handshake and a byte from the server; return the client's end."""
    inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(inward, outward, server_side=True)
    client = client_context.wrap_bio(outward, inward, server_hostname="gateway", session=session)
    for end in (client, server) * 2:
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    server.write(b"x")
    assert client.read(1) == b"x"
    return client


@pytest.mark.parametrize("asks_clients", [True, False])
def test_no_session_goes_on_without_a_look_at_the_clients_certificate(pki, asks_clients):
    """Attacker: a client whose certificate has ended since, with the ticket of its last connection."""
    listen = ListenConfig(
        port=0,
        certificate=pki / "gateway" / "certificate.pem",
        private_key=pki / "gateway" / "tls.key",
        client_authority=pki / "authority.pem" if asks_clients else None,
    )
    server_context = make_server(None, listen, RequestBounds()).config.ssl
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    client_context.load_verify_locations(pki / "authority.pem")
    client_context.load_cert_chain(pki / "client" / "certificate.pem", pki / "client" / "tls.key")

    first = shake_hands(server_context, client_context)
    again = shake_hands(server_context, client_context, first.session)

    # where no certificate of a client counts, there is nothing that a session could pass over
    assert again.session_reused is not asks_clients
