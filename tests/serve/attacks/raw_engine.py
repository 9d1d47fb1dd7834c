"""An engine that answers with any bytes, by the last word of the prompt: what no honest server would send."""

import json
import socket
import threading
from collections.abc import Iterator

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nConnection: close\r\n\r\n"
JSON, EVENTS = b"application/json", b"text/event-stream"


class RawEngine:
    """Runs in threads of the test; `answers` has the bytes of each answer, head included, by prompt."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes | Iterator[bytes]] = {}
        self.broken = threading.Event()

    def __enter__(self) -> "RawEngine":
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(30)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            path, body = read_request(connection)
            answer = HEAD % JSON + b'{"object": "list", "data": []}' if path == "/v1/models" else self._find(body)
            try:
                if isinstance(answer, bytes):
                    connection.sendall(answer)
                else:
                    for piece in answer:
                        connection.sendall(piece)
            except OSError:
                self.broken.set()

    def _find(self, body: bytes) -> bytes | Iterator[bytes]:
        value = json.loads(body)
        text = value["messages"][-1]["content"] if "messages" in value else value.get("prompt", value.get("input"))
        return self.answers[text]


def read_request(connection: socket.socket) -> tuple[str, bytes]:
    """Return the path and the body of one request."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return "/v1/models", b""
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    while len(body) < int(lengths[0] if lengths else 0):
        piece = connection.recv(65536)
        if not piece:
            return "/v1/models", b""
        body += piece
    return head.split(b" ")[1].decode(), body
