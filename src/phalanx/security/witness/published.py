"""A log as static files, C2SP tlog-tiles: any web server publishes the directory, and anybody reads or mirrors it.

DIR/checkpoint                     the newest head, signed by the log and cosigned
DIR/tile/LEVEL/INDEX[.p/WIDTH]     256 hashes, or fewer at the right edge
DIR/tile/entries/INDEX[.p/WIDTH]   256 entries, each the BLAKE3 digest of one line of ``events.jsonl``
DIR/cosigned/ID                    the newest head that each witness has cosigned, by the key's ID
"""

import contextlib
import http.client
import os
import socket
import threading
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from http import HTTPStatus
from pathlib import Path

from phalanx.errors import AuditLogError, DiskError
from phalanx.security.audit import LogEntry
from phalanx.security.audit.line import read_entries
from phalanx.security.crypto import Peer
from phalanx.security.witness.notes import MAX_NOTE_BYTES, NoteKey, SignedCheckpoint
from phalanx.security.witness.tree import HashTree, check_consistency, hash_leaf

TILE_WIDTH, _TILE_LEVELS = 256, 8
ENTRY_BYTES = 32
CHECKPOINT = "checkpoint"
EXCHANGE_TIMEOUT_S = 15.0
_MAX_ENTRIES = 2**26


def tile_paths(size: int) -> Iterator[tuple[int, int, int]]:
    """Yield level, index and width of every tile of a tree."""
    level = 0
    while (count := size >> (_TILE_LEVELS * level)) > 0:
        for index in range(0, count, TILE_WIDTH):
            yield level, index // TILE_WIDTH, min(TILE_WIDTH, count - index)
        level += 1


def tile_path(level: int | str, index: int, width: int) -> str:
    """Return the path of a tile, or with level ``entries`` of a bundle of entries."""
    parts = [f"{index % 1000:03}"]
    while index >= 1000:
        index //= 1000
        parts.insert(0, f"x{index % 1000:03}")
    return f"tile/{level}/{'/'.join(parts)}" + ("" if width == TILE_WIDTH else f".p/{width}")


class HistoryCopy:
    """The entries of a log, with their tree, in one process's memory."""

    def __init__(self, entries: Iterable[bytes]) -> None:
        self.entries = list(entries)
        self.tree = HashTree(map(hash_leaf, self.entries))

    @classmethod
    def from_events(cls, path: Path, signer: Peer, run: str | None) -> "HistoryCopy":
        """Read the whole lines of an audit log, each checked; a line that is being written is left for later."""
        return cls(bytes.fromhex(entry.head.digest) for entry in read_complete_entries(path, signer, run))


def read_complete_entries(path: Path, signer: Peer, run: str | None) -> Iterator[LogEntry]:
    """Yield the checked lines of a log that its owner may be writing to."""
    try:
        with path.open("rb") as file:
            # what is signed must outlive this machine's crash
            os.fsync(file.fileno())
            size, position = os.fstat(file.fileno()).st_size, 0
            for entry in read_entries(file, path, signer, run):
                yield entry
                position += entry.size_bytes
                if position >= size:
                    return
    except AuditLogError as exc:
        if not str(exc).endswith("it is cut off"):
            raise
    except OSError as exc:
        raise AuditLogError(f"{path}: cannot be read ({exc.strerror})") from exc


def write_tiles(directory: Path, history: HistoryCopy, size: int) -> int:
    """Write the tiles and bundles of a tree that are not there yet, and return how many those were.

    Raises:
        AuditLogError: A file is there with other bytes: another history was published here.
    """
    written = 0
    try:
        for level, index, width in tile_paths(size):
            start = index * TILE_WIDTH
            hashes = history.tree.levels[_TILE_LEVELS * level][start : start + width]
            written += _write_once(directory / tile_path(level, index, width), b"".join(hashes))
            if level == 0:
                bundle = b"".join(len(e).to_bytes(2, "big") + e for e in history.entries[start : start + width])
                written += _write_once(directory / tile_path("entries", index, width), bundle)
    except OSError as exc:
        raise DiskError(f"{directory}: cannot be written ({exc.strerror})") from exc
    return written


def _write_once(path: Path, data: bytes) -> bool:
    if path.exists():
        if path.read_bytes() != data:
            raise AuditLogError(f"{path}: another history was published here; publish this one elsewhere")
        return False
    replace_synced(path, data)
    return True


def replace_synced(path: Path, data: bytes) -> None:
    """Write a file, force it and its name to disk, and put it in the place of an older one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fetch_bytes(location: str, name: str, max_bytes: int) -> bytes:
    """Read one file of a published log.

    Args:
        location: Directory, or ``http://`` or ``https://`` prefix; a redirect is not followed.
    """
    try:
        if location.startswith(("http://", "https://")):
            status, data = exchange_bytes("GET", f"{location.rstrip('/')}/{name}", None, max_bytes)
            if status != HTTPStatus.OK:
                raise AuditLogError(f"{location}: {name} cannot be read (status {status})")
        else:
            with (Path(location) / name).open("rb") as file:
                data = file.read(max_bytes + 1)
    except (OSError, ValueError, http.client.HTTPException) as exc:
        raise AuditLogError(f"{location}: {name} cannot be read ({getattr(exc, 'strerror', None) or exc})") from exc
    if len(data) > max_bytes:
        raise AuditLogError(f"{location}: {name} is longer than {max_bytes} bytes")
    return data


def exchange_bytes(
    method: str, url: str, body: bytes | None, max_bytes: int, content_type: str | None = None
) -> tuple[int, bytes]:
    """Send one request and return status and body, of which at most one byte more than allowed is read.

    Raises:
        OSError, http.client.HTTPException: Nobody answers, or not over HTTP.
        ValueError: The address is none.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.hostname is None:
        raise ValueError(f"{url[:80]!r}: expected http:// or https://")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=EXCHANGE_TIMEOUT_S)
    is_late = threading.Event()
    try:
        connection.connect()
        # the timeout of a socket begins anew with each byte, and whoever answers may send one at a time
        timer = threading.Timer(EXCHANGE_TIMEOUT_S, _end_exchange, (connection.sock, is_late))
        timer.daemon = True
        timer.start()
        try:
            headers = {} if content_type is None else {"Content-Type": content_type}
            connection.request(method, parts.path or "/", body, headers)
            answer = connection.getresponse()
            status, data = answer.status, answer.read(max_bytes + 1)
        finally:
            timer.cancel()
        if is_late.is_set():
            raise TimeoutError(f"no whole answer within {EXCHANGE_TIMEOUT_S:g} s")
        return status, data
    finally:
        connection.close()


def _end_exchange(connection: socket.socket, is_late: threading.Event) -> None:
    is_late.set()
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def read_checkpoint(location: str) -> SignedCheckpoint:
    """Read the newest head of a published log, or a file that holds one; no signature is checked."""
    path = Path(location)
    if not location.startswith(("http://", "https://")) and path.is_file():
        return SignedCheckpoint.from_bytes(fetch_bytes(str(path.parent), path.name, MAX_NOTE_BYTES))
    return SignedCheckpoint.from_bytes(fetch_bytes(location, CHECKPOINT, MAX_NOTE_BYTES))


def read_history(location: str, signed: SignedCheckpoint) -> HistoryCopy:
    """Read all entries under a head of a published log."""
    head = signed.checkpoint.head
    if head.size > _MAX_ENTRIES:
        raise AuditLogError(f"{location}: {head.size} entries, at most {_MAX_ENTRIES} are read")
    entries: list[bytes] = []
    for level, index, width in tile_paths(head.size):
        if level == 0:
            name = tile_path("entries", index, width)
            entries += _split_bundle(fetch_bytes(location, name, width * (2 + ENTRY_BYTES)), width, name)
    history = HistoryCopy(entries)
    if history.tree.head_at(head.size) != head:
        raise AuditLogError(f"{location}: its entries are not those under the root of its checkpoint")
    return history


def _split_bundle(data: bytes, width: int, name: str) -> list[bytes]:
    step = 2 + ENTRY_BYTES
    parts = [data[start : start + step] for start in range(0, len(data), step)]
    prefix = ENTRY_BYTES.to_bytes(2, "big")
    if len(parts) != width or len(data) != width * step or any(part[:2] != prefix for part in parts):
        raise AuditLogError(f"{name}: expected {width} entries of {ENTRY_BYTES} bytes")
    return [part[2:] for part in parts]


def mirror_history(location: str, directory: Path, keys: Sequence[NoteKey]) -> tuple[SignedCheckpoint, HistoryCopy]:
    """Check a published log as a whole and return it, where it continues what this mirror has already.

    Raises:
        AuditLogError: It is not signed by one of the keys, incomplete, or does not continue the copy in `directory`.
    """
    signed = read_checkpoint(location)
    if not any(key.name == signed.checkpoint.origin for key in signed.check_signatures(keys)):
        raise AuditLogError(f"{location}: the checkpoint is signed by none of the log's keys")
    history = read_history(location, signed)
    if (directory / CHECKPOINT).exists():
        copy, new = read_checkpoint(str(directory)).checkpoint, signed.checkpoint
        if copy.origin != new.origin or copy.head.size > new.head.size:
            raise AuditLogError(
                f"{location}: {new.head.size} entries of {new.origin!r}; "
                f"this mirror has {copy.head.size} of {copy.origin!r}"
            )
        check_consistency(copy.head, new.head, history.tree.prove_consistency(copy.head.size, new.head.size))
    return signed, history
