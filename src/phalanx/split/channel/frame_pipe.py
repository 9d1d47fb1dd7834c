"""Wires over one socket pair, for an enclave that may reach no network: it at one end, its parties at the other.

    u64 size | u8 question or answer | u64 number | u8 length, sender | u8 length, receiver | bytes

The kernel proves that the other end is the process that was started, and nothing more: the frames' own signatures
prove which of its parties sent them.
"""

import contextlib
import itertools
import socket
import struct
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError

from phalanx.errors import PeerGoneError, PeerLostError
from phalanx.transport import Handle

_SIZE, _HEAD = struct.Struct(">Q"), struct.Struct(">BQB")
_QUESTION, _ANSWER = 0, 1
_SLACK_BYTES = 64 * 1024
_NUM_THREADS = 8
_MAX_EARLY = 8


class FramePipe:
    """One end of the pair, for all parties of its process.

    Args:
        end: A connected stream socket; used by no other object.
        max_frame_bytes: Larger ones end the pipe.
    """

    def __init__(self, end: socket.socket, max_frame_bytes: int) -> None:
        self._end, self._most = end, max_frame_bytes + _SLACK_BYTES
        self._handles: dict[str, Handle] = {}
        self._early: list[tuple[int, str, str, memoryview]] = []
        self._waiting: dict[int, Future[bytes]] = {}
        self._numbers = itertools.count()
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._is_closed = False
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="frame-pipe")
        self._reader = threading.Thread(target=self._read_all, name="frame-pipe-reader", daemon=True)
        self._reader.start()

    def open_wire(self, name: str) -> "PipeWire":
        """Return the wire of a party at this end."""
        return PipeWire(self, name)

    def serve_party(self, name: str, handle: Handle) -> None:
        """Pass frames for a party of this end to `handle`, those first that came before it served."""
        with self._lock:
            self._handles[name] = handle
            early = [frames for frames in self._early if frames[2] == name]
            self._early = [frame for frame in self._early if frame[2] != name]
        for number, sender, receiver, raw in early:
            self._pool.submit(self._send_answer, handle, number, sender, receiver, raw)

    def exchange_frame(self, sender: str, receiver: str, raw: bytes, timeout_s: float) -> bytes:
        """Return the other end's answer to a frame."""
        number, answer = next(self._numbers), Future[bytes]()
        with self._lock:
            if self._is_closed:
                raise PeerGoneError(f"{receiver}: the other end of the pipe is closed")
            self._waiting[number] = answer
        try:
            self._send_frame(_QUESTION, number, sender, receiver, raw)
            return answer.result(timeout_s)
        except FutureTimeoutError as exc:
            raise PeerLostError(f"{receiver}: no answer within {timeout_s:g} s") from exc
        finally:
            with self._lock:
                self._waiting.pop(number, None)

    def is_open(self) -> bool:
        """Whether the other end is there."""
        with self._lock:
            return not self._is_closed

    def close(self) -> None:
        """End both directions; calls that wait for an answer fail. Closing twice is harmless."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._fail_waiting()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._end.close()

    def _send_frame(self, kind: int, number: int, sender: str, receiver: str, raw: bytes) -> None:
        names = bytes([len(sender)]) + sender.encode("ascii") + bytes([len(receiver)]) + receiver.encode("ascii")
        body = _HEAD.pack(kind, number, 0)[:-1] + names
        try:
            with self._sending:
                self._end.sendall(_SIZE.pack(len(body) + len(raw)) + body)
                self._end.sendall(raw)
        except OSError as exc:
            raise PeerGoneError(f"{receiver}: the other end of the pipe is closed ({exc.strerror})") from exc

    def _read_all(self) -> None:
        try:
            while True:
                size = _SIZE.unpack(self._read_bytes(_SIZE.size))[0]
                if not _HEAD.size <= size <= self._most:
                    return
                self._dispatch_message(self._read_bytes(size))
        except (OSError, EOFError, ValueError, IndexError, struct.error):
            # closed, or no pipe of ours: nothing more can be made of it
            return
        finally:
            self._fail_waiting()

    def _dispatch_message(self, message: memoryview) -> None:
        kind, number, length = _HEAD.unpack_from(message)
        start = _HEAD.size
        sender, start = str(message[start : start + length], "ascii"), start + length
        length, start = message[start], start + 1
        receiver, start = str(message[start : start + length], "ascii"), start + length
        if kind == _ANSWER:
            with self._lock:
                waiting = self._waiting.pop(number, None)
            if waiting is not None:
                waiting.set_result(bytes(message[start:]))
            return
        with self._lock:
            handle = self._handles.get(receiver)
            if handle is None and len(self._early) < _MAX_EARLY:
                self._early.append((number, sender, receiver, message[start:]))
        if handle is not None:
            self._pool.submit(self._send_answer, handle, number, sender, receiver, message[start:])

    def _send_answer(self, handle: Handle, number: int, sender: str, receiver: str, raw: memoryview) -> None:
        # the asker is gone where this fails, and has been told
        with contextlib.suppress(PeerLostError):
            self._send_frame(_ANSWER, number, receiver, sender, handle(raw, sender))

    def _read_bytes(self, size: int) -> memoryview:
        data = bytearray(size)
        buffer = view = memoryview(data)
        while view:
            count = self._end.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return buffer.toreadonly()

    def _fail_waiting(self) -> None:
        with self._lock:
            self._is_closed = True
            waiting, self._waiting = list(self._waiting.values()), {}
        for future in waiting:
            future.set_exception(PeerGoneError("the other end of the pipe is closed"))


class PipeWire:
    """The `Wire` of one party at one end."""

    address = "pipe"

    def __init__(self, pipe: FramePipe, name: str) -> None:
        self._pipe, self._name = pipe, name

    def serve_frames(self, handle: Handle, run: str) -> None:
        """As `Wire` says."""
        self._pipe.serve_party(self._name, handle)

    def add_route(self, name: str, address: str) -> None:
        """Do nothing: every other party is at the other end."""

    def deliver_frame(self, receiver: str, raw: bytes, timeout_s: float) -> bytes:
        """As `Wire` says."""
        return self._pipe.exchange_frame(self._name, receiver, raw, timeout_s)

    def close(self) -> None:
        """As `Wire` says; the pipe's maker closes the pipe itself."""
