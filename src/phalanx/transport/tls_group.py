"""The key exchange of links: which group TLS 1.3 negotiates with a server, seen in its own ServerHello.

gRPC tells nobody. So the very ClientHello that gRPC sends is caught once on loopback, and shown to a server: its
answer names the group in the clear. A man in the middle cannot choose another one for the real link: the signature
of the handshake is over both messages.
"""

import functools
import socket

from phalanx.errors import FrameError, PeerLostError, TransportError
from phalanx.security.crypto import Identity
from phalanx.transport.config import TransportConfig
from phalanx.transport.grpc_tls import open_channel

HYBRID_GROUP = 0x11EC
GROUP_NAMES = {0x11EC: "X25519MLKEM768", 0x001D: "X25519", 0x0017: "P-256", 0x0018: "P-384"}
_TIMEOUT_S = 20.0
_HANDSHAKE_RECORD, _SERVER_HELLO, _KEY_SHARE = 22, 2, 51
_MAX_RECORD_BYTES = 2**14 + 256


def check_hybrid_group(identity: Identity, host: str, port: int) -> None:
    """Ask a server by gRPC's own ClientHello and return when it chooses X25519MLKEM768.

    Raises:
        TransportError: It chooses another group, or this process's gRPC does not offer that one.
        PeerLostError: It does not answer.
    """
    group = negotiated_group(host, port, grpc_client_hello(identity))
    if group != HYBRID_GROUP:
        name = GROUP_NAMES.get(group, f"group {group:#06x}")
        raise TransportError(
            f"{host}:{port}: negotiates {name} with this process, expected X25519MLKEM768; "
            'transport.post_quantum = "demand" needs grpcio 1.85 or newer at both ends'
        )


def grpc_client_hello(identity: Identity) -> bytes:
    """Return the first record that gRPC sends, caught once a process."""
    return _catch_hello(identity.authority_pem, identity)


@functools.lru_cache(maxsize=1)
def _catch_hello(authority: bytes, identity: Identity) -> bytes:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_TIMEOUT_S)
        channel = open_channel(identity, identity.name, f"127.0.0.1:{listener.getsockname()[1]}", TransportConfig())
        # a call makes the channel connect, and is ended before it can be sent
        call = channel.unary_unary("/phalanx.Transport/Describe").future(b"")
        try:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(_TIMEOUT_S)
                return _receive_record(connection)
        finally:
            call.cancel()
            channel.close()


def negotiated_group(host: str, port: int, hello: bytes) -> int:
    """Show a ClientHello to a server and return the number of the group that it chooses."""
    try:
        with socket.create_connection((host, port), timeout=_TIMEOUT_S) as connection:
            connection.sendall(hello)
            return _chosen_group(_receive_record(connection))
    except (OSError, FrameError) as exc:
        raise PeerLostError(f"{host}:{port}: does not answer a TLS 1.3 hello ({exc})") from exc


def _receive_record(connection: socket.socket) -> bytes:
    data = b""
    while len(data) < 5 or len(data) < 5 + int.from_bytes(data[3:5], "big"):
        piece = connection.recv(_MAX_RECORD_BYTES)
        if not piece or len(data) > _MAX_RECORD_BYTES:
            raise FrameError("the connection ended inside a TLS record")
        data += piece
    return data[: 5 + int.from_bytes(data[3:5], "big")]


def _chosen_group(record: bytes) -> int:
    """Return the group in the key_share of a ServerHello or HelloRetryRequest."""
    if record[0] != _HANDSHAKE_RECORD or record[5:6] != bytes([_SERVER_HELLO]):
        raise FrameError("no ServerHello came")
    body = record[9:]
    position = 2 + 32 + 1 + body[34] + 2 + 1
    end = position + 2 + int.from_bytes(body[position : position + 2], "big")
    position += 2
    while position + 4 <= min(end, len(body)):
        kind, length = (int.from_bytes(body[at : at + 2], "big") for at in (position, position + 2))
        if kind == _KEY_SHARE and length >= 2:
            return int.from_bytes(body[position + 4 : position + 6], "big")
        position += 4 + length
    raise FrameError("the ServerHello names no group")
