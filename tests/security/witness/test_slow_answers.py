"""A witness that answers one byte at a time costs the log no more time than a dead one."""

import socket
import threading

import pytest

from phalanx.security.witness import published


@pytest.mark.parametrize("start", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "], ids=["body", "headers"])
def test_an_answer_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    # the attacker: a witness that would keep a run from its next head
    monkeypatch.setattr(published, "EXCHANGE_TIMEOUT_S", 0.5)
    is_over = threading.Event()

    def answer_slowly(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(start)
            # ended by the client alone, or by the test
            while not is_over.wait(0.05):
                try:
                    connection.sendall(b"x")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer_slowly, args=(listener,))
        thread.start()
        # 60 000 bytes and more at 20 a second: without an end of its own the read would go on for an hour
        with pytest.raises(TimeoutError):
            published.exchange_bytes("GET", f"http://127.0.0.1:{listener.getsockname()[1]}/checkpoint", None, 60_000)
        is_over.set()
        thread.join()
