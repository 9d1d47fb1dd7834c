"""gRPC set up so that only mutual TLS 1.3 between two named parties can come about."""

import contextlib
import os
import socket
import ssl

# TLS 1.2 suites are limited to those that need an RSA certificate, and ours are all ECDSA: no TLS 1.2
# handshake finds a suite. TLS 1.3 suites are another list and stay. gRPC reads this once, so early.
os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-RSA-AES256-GCM-SHA384"
# refused handshakes are ordinary input here and reported as our errors, not as log lines
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# other modules take it from here, so that nothing imports it before the lines above
import grpc

from phalanx.errors import CertificateError, TransportError
from phalanx.security.crypto import Identity, certified_name, tls_server_name
from phalanx.transport.config import TransportConfig

__all__ = [
    "check_refuses_tls12",
    "grpc",
    "open_channel",
    "server_credentials",
    "server_options",
]
Options = list[tuple[str, int | str]]
# what gRPC adds around a frame, and room for our own refusal to be the one that the sender sees
_MESSAGE_SLACK_BYTES = 1024
_FIRST_BACKOFF_MS, _LAST_BACKOFF_MS = 100, 1000
_HANDSHAKE_MS = 10_000
_STREAMS_PER_CONNECTION = 8
_PROBE_TIMEOUT_S = 10.0
_TLS_HANDSHAKE_RECORD = 22


def server_credentials(identity: Identity) -> grpc.ServerCredentials:
    """Return credentials that demand a certificate of the same authority from every client."""
    _check_complete(identity)
    pair = (identity.tls_key_pem, identity.certificate_pem)
    return grpc.ssl_server_credentials([pair], root_certificates=identity.authority_pem, require_client_auth=True)


def open_channel(identity: Identity, party: str, address: str, config: TransportConfig) -> grpc.Channel:
    """Return a channel to one party; TLS refuses any other party that answers at the address."""
    _check_complete(identity)
    credentials = grpc.ssl_channel_credentials(identity.authority_pem, identity.tls_key_pem, identity.certificate_pem)
    options: Options = [
        *_shared_options(config),
        ("grpc.ssl_target_name_override", tls_server_name(certified_name(party))),
        ("grpc.initial_reconnect_backoff_ms", _FIRST_BACKOFF_MS),
        ("grpc.max_reconnect_backoff_ms", _LAST_BACKOFF_MS),
        ("grpc.min_reconnect_backoff_ms", _HANDSHAKE_MS),
        ("grpc.enable_http_proxy", 0),
        # the outbox repeats a frame itself, knowing that the receiver recognises it
        ("grpc.enable_retries", 0),
        ("grpc.service_config_disable_resolution", 1),
        # two identities in one process must not share a connection
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.secure_channel(address, credentials, options=options)


def server_options(config: TransportConfig) -> Options:
    """Return the options of a server."""
    return [
        *_shared_options(config),
        # another process must not be able to share the port
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_concurrent_streams", _STREAMS_PER_CONNECTION),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 50),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def check_refuses_tls12(host: str, port: int) -> None:
    """Ask a running server for TLS 1.2 and return when it refuses.

    How gRPC limits its suites is not part of its promises, so it is tried each time a server starts.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # only the very first answer is looked at, and nothing is ever sent: which server answers does not matter
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    hello = context.wrap_bio(incoming, outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        hello.do_handshake()
    try:
        with socket.create_connection((host, port), timeout=_PROBE_TIMEOUT_S) as connection:
            connection.sendall(outgoing.read())
            answer = connection.recv(1)
    except ConnectionResetError:
        return
    except OSError as exc:
        raise TransportError(f"{host}:{port}: the own server does not answer ({exc})") from exc
    if answer and answer[0] == _TLS_HANDSHAKE_RECORD:
        raise TransportError(
            f"{host}:{port}: the own server agrees to TLS 1.2, expected only 1.3; import phalanx.transport "
            "before grpc, or set GRPC_SSL_CIPHER_SUITES=ECDHE-RSA-AES256-GCM-SHA384 for the process"
        )


def _shared_options(config: TransportConfig) -> Options:
    keepalive_ms = int(config.keepalive_s * 1000)
    return [
        ("grpc.max_send_message_length", config.max_frame_bytes + _MESSAGE_SLACK_BYTES),
        ("grpc.max_receive_message_length", config.max_frame_bytes + _MESSAGE_SLACK_BYTES),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _check_complete(identity: Identity) -> None:
    if not (identity.tls_key_pem and identity.certificate_pem and identity.authority_pem):
        raise CertificateError(f"{identity.name}: has no certificate; issue one with phalanx pki issue")
