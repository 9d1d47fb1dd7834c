"""Tensors between processes of one machine, over TCP, with the bytes of each party counted."""

import json
import socket
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import safetensors.torch
from torch import Tensor

from phalanx.closing import Closeable


class MessageKey(NamedTuple):
    """What a message is: ``forward``, ``backward``, or the copy of one that a duplicate needs; and which one.

    Attributes:
        about: Stage whose output or input gradient it is, or, of a copy, whose work is repeated with it.
    """

    kind: str
    step: int
    attempt: int
    microbatch: int
    about: int


class TensorLinks(Closeable):
    """One party's socket to listen on, its sockets to others, and the messages that have arrived.

    Args:
        name: Of the party; a message to itself crosses no socket and is not counted.

    Attributes:
        sent_bytes: Bytes that were sent, by kind of message.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._addresses: Mapping[str, int] = {}
        self._sockets: dict[str, socket.socket] = {}
        self._arrived: dict[MessageKey, dict[str, Tensor]] = {}
        self._news = threading.Condition()
        self.sent_bytes: Counter[str] = Counter()
        threading.Thread(target=self._accept_peers, daemon=True).start()

    @property
    def port(self) -> int:
        """Where others reach this party."""
        return int(self._listener.getsockname()[1])

    def set_addresses(self, ports: Mapping[str, int]) -> None:
        """Learn where the others are reached."""
        self._addresses = ports

    def send_tensors(self, party: str, key: MessageKey, tensors: Mapping[str, Tensor]) -> None:
        """Send tensors of any shape; the caller does not change them afterwards."""
        if party == self._name:
            self._deliver(key, dict(tensors))
            return
        content = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})
        frame = json.dumps([key, len(content)]).encode() + b"\n" + content
        if party not in self._sockets:
            self._sockets[party] = socket.create_connection(("127.0.0.1", self._addresses[party]))
        self._sockets[party].sendall(frame)
        self.sent_bytes[key.kind] += len(frame)

    def await_tensors(self, key: MessageKey) -> dict[str, Tensor]:
        """Wait for one message."""
        with self._news:
            self._news.wait_for(lambda: key in self._arrived)
            return self._arrived.pop(key)

    def await_any(self) -> tuple[MessageKey, dict[str, Tensor]]:
        """Wait for the next message of any kind, in the order of arrival."""
        with self._news:
            self._news.wait_for(lambda: self._arrived)
            key = next(iter(self._arrived))
            return key, self._arrived.pop(key)

    def close(self) -> None:
        for open_socket in (self._listener, *self._sockets.values()):
            open_socket.close()

    def _accept_peers(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._read_peer, args=(peer.makefile("rb"),), daemon=True).start()

    def _read_peer(self, stream: BinaryIO) -> None:
        while header := stream.readline():
            key, size = json.loads(header)
            self._deliver(MessageKey(*key), safetensors.torch.load(stream.read(size)))

    def _deliver(self, key: MessageKey, tensors: dict[str, Any]) -> None:
        with self._news:
            self._arrived[key] = tensors
            self._news.notify_all()
