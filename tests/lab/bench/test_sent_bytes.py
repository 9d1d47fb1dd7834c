"""The kernel's count of sent bytes, by which rows of a bench say what ranks exchange."""

import socket
import sys
import time

import pytest

from phalanx.lab.bench.parallel.rank_training import read_sent_bytes

SENT = 1_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts them")
def test_what_a_connection_has_sent_is_counted_once_and_what_it_received_is_not():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as receiver,
    ):
        before = read_sent_bytes()
        received, sent = 0, 0
        while received < SENT:
            if sent < SENT:
                sent += sender.send(b"x" * min(10_000, SENT - sent))
            received += len(receiver.recv(10_000))
        for _ in range(1000):
            # the last bytes are acknowledged a moment later
            if read_sent_bytes() - before >= SENT:
                break
            time.sleep(0.01)

        # both ends are of this process, and one of them sent nothing
        assert read_sent_bytes() - before == SENT
