"""The engine's side of the bridge: frames between a local socket and whatever carries them; standard library alone.

An engine such as NVFlare or Flower may live in an environment of its own, without phalanx: this file is copied there.
Its server has an `OwnerConnection`, and each of its clients calls `ask_site`. Nothing here reads or makes a frame: they
are signed by keys that only the owner and the sites have.

A message on either socket is a head and two runs of bytes (numbers are big-endian):

    "PHXB" | u8 kind | u32 number | u16 bytes of the name | u64 bytes of the data | name | data
"""

import contextlib
import os
import select
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

ORDER, ANSWER, LOST, SITES, END, REFUSED = 1, 2, 3, 4, 5, 6
"""Kinds: a frame for a site, its answer, word that none will come, the names that can be reached now, the run's end,
word of the owner that an answer was not the site's, or that none came to its greeting."""
MAX_BYTES = 2**30 + 2**21
"""Of a message's data: the largest frame that any run may have."""
_HEAD = struct.Struct(">4sBIHQ")
_MAGIC = b"PHXB"
_MAX_NAME_BYTES, _MAX_SITE_NAME, _MAX_WORDS_BYTES = 255, 63, 2**20
_PIECE_BYTES = 2**20
_MAX_PATH_BYTES = 107
_WHOLE_MESSAGE_S = 300.0


class SocketLostError(ConnectionError):
    """The other end of a socket is gone, or its bytes are no message."""


class SiteRefusedError(SocketLostError):
    """The site's process does not take a frame; the text says why."""


class ShimMessage(NamedTuple):
    """One message.

    Attributes:
        kind: One of the 6 kinds.
        name: The site; empty where it is about none.
    """

    kind: int
    number: int = 0
    name: str = ""
    data: bytes = b""


def write_message(line: socket.socket, message: ShimMessage) -> None:
    """Send one message."""
    name = message.name.encode("utf-8")
    try:
        line.settimeout(_WHOLE_MESSAGE_S)
        line.sendall(_HEAD.pack(_MAGIC, message.kind, message.number, len(name), len(message.data)) + name)
        line.sendall(message.data)
    except OSError as exc:
        raise SocketLostError(f"socket: cannot send ({exc})") from exc


def read_message(line: socket.socket, max_bytes: int = MAX_BYTES, timeout_s: float | None = None) -> ShimMessage | None:
    """Return the next message; None where none has begun in time.

    Args:
        max_bytes: Bound of the data in bytes. An answer above it is passed over and reads as lost: one site's answer
            must not end the line of all.
        timeout_s: Seconds to wait for its beginning; None for no limit.
    """
    try:
        if timeout_s is not None and not select.select([line], [], [], timeout_s)[0]:
            return None
        line.settimeout(None if timeout_s is None else _WHOLE_MESSAGE_S)
        kind, number, name_size, data_size = _check_head(_read_exactly(line, _HEAD.size), max_bytes)
        line.settimeout(_WHOLE_MESSAGE_S)
        name = _read_exactly(line, name_size).decode("utf-8")
        if data_size > max_bytes:
            _pass_over(line, data_size)
            reason = f"its answer has {data_size} bytes, above the limit of {max_bytes}"
            return ShimMessage(LOST, number, name, reason.encode("ascii"))
        return ShimMessage(kind, number, name, _read_exactly(line, data_size))
    except UnicodeDecodeError as exc:
        raise SocketLostError("socket: a name is not UTF-8") from exc
    except SocketLostError:
        raise
    except (OSError, ValueError) as exc:
        raise SocketLostError(f"socket: is closed ({exc})") from exc


def listen_at(path: str) -> socket.socket:
    """Listen at a path in a directory that only this user can enter; the socket of a dead process is replaced.

    Raises:
        SocketLostError: The directory is open to others, the path is too long, or another process listens there.
    """
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if stat.S_IMODE(os.stat(folder).st_mode) & 0o077:
        raise SocketLostError(f"{folder}: others can enter this directory; run chmod 700 on it, or choose another")
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise SocketLostError(f"{path}: a socket's path has at most {_MAX_PATH_BYTES} bytes; choose a shorter one")
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(path) == 0:
            raise SocketLostError(f"{path}: another process listens on it; end that process, or choose another path")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(path)
        os.chmod(path, 0o600)
        server.listen(8)
    except OSError as exc:
        server.close()
        raise SocketLostError(f"{path}: cannot listen on it ({exc})") from exc
    return server


def connect_to(path: str) -> socket.socket:
    """Connect to a process that listens at a path."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError as exc:
        connection.close()
        raise SocketLostError(f"{path}: no process listens on it ({exc.strerror or exc})") from exc
    return connection


def ask_site(path: str, frame: bytes) -> bytes:
    """Deliver one frame to the site's process, and return its answer, however long that takes."""
    with connect_to(path) as connection:
        write_message(connection, ShimMessage(ORDER, data=frame))
        message = read_message(connection)
    if message is None or message.kind not in (ANSWER, LOST):
        raise SocketLostError(f"{path}: sent a message that is not an answer")
    if message.kind == LOST:
        raise SiteRefusedError(message.data.decode("utf-8", "replace"))
    return message.data


class OwnerConnection:
    """The line from an engine's server to the owner of a run; several threads may answer at a time.

    Attributes:
        note_refused: Takes site and number of a frame whose answer the owner has refused, or gave up.
    """

    def __init__(self, path: str) -> None:
        self.note_refused: Callable[[str, int], object] = lambda site, number: None
        self._line = connect_to(path)
        self._lock = threading.Lock()

    def tell_sites(self, names: Iterable[str]) -> None:
        """Say which sites can be reached now; the owner asks no other, and takes those left out for gone.

        A name that no site can have is left out: nodes choose theirs.
        """
        plain = sorted(name for name in names if len(name) <= _MAX_SITE_NAME and name.isascii() and name.isprintable())
        self._write_to_owner(ShimMessage(SITES, data="\n".join(plain).encode("utf-8")))

    def next_frame(self, timeout_s: float) -> ShimMessage | None:
        """Return a frame (`data`) to deliver to the site `name`, or one of kind `END`; None where none came in time."""
        while (message := read_message(self._line, timeout_s=timeout_s)) is not None and message.kind == REFUSED:
            self.note_refused(message.name, message.number)
        return message

    def send_answer(self, number: int, site: str, frame: bytes) -> None:
        """Hand in a site's answer to the frame of this number; one that no run takes is reported as lost."""
        if len(frame) > MAX_BYTES:
            self.report_loss(number, site, f"its answer has {len(frame)} bytes")
            return
        self._write_to_owner(ShimMessage(ANSWER, number, site, frame))

    def report_loss(self, number: int, site: str, reason: str) -> None:
        """Say that no answer will come to the frame of this number."""
        self._write_to_owner(ShimMessage(LOST, number, site, reason.encode("utf-8", "replace")[:1000]))

    def close(self) -> None:
        """Part from the owner; a thread that waits for a frame is woken, and the owner hears of it at once."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self._line.close()

    def _write_to_owner(self, message: ShimMessage) -> None:
        with self._lock:
            write_message(self._line, message)


def _check_head(head: bytes, max_bytes: int) -> tuple[int, int, int, int]:
    magic, kind, number, name_size, data_size = _HEAD.unpack(head)
    if magic != _MAGIC or kind not in (ORDER, ANSWER, LOST, SITES, END, REFUSED):
        raise SocketLostError("socket: received bytes are not a message; both ends need the same release")
    bound = {ANSWER: MAX_BYTES, ORDER: max_bytes}.get(kind, _MAX_WORDS_BYTES)
    if name_size > _MAX_NAME_BYTES or data_size > bound:
        raise SocketLostError(f"socket: a message has {data_size} bytes and a name of {name_size}, above the limits")
    return kind, number, name_size, data_size


def _read_exactly(line: socket.socket, size: int) -> bytes:
    """Read so many bytes; memory is reserved only for bytes that have come, whatever length was announced."""
    return b"".join(_read_pieces(line, size))


def _pass_over(line: socket.socket, size: int) -> None:
    for _ in _read_pieces(line, size):
        pass


def _read_pieces(line: socket.socket, size: int) -> Iterator[bytes]:
    while size:
        piece = line.recv(min(size, _PIECE_BYTES))
        if not piece:
            raise SocketLostError("socket: the other end disconnected")
        yield piece
        size -= len(piece)
