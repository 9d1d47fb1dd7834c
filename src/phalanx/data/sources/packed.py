"""Files packed by gzip or Zstandard: unpacked in steps of bounded size, and again after damage.

A packed byte may claim to stand for a thousand others, so input is fed to a decoder in pieces so small that one of
them cannot become more than about 16 MiB. What comes out is counted against what went in.
"""

import importlib
import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from phalanx.data.sources.files import SourceFile, unreadable_error
from phalanx.data.sources.spans import MemberBorders
from phalanx.errors import DataError
from phalanx.object_stores import client_errors

_BLOCK_BYTES = 1 << 20
_FREE_BYTES = 16 << 20
"""Below this a ratio says nothing: a short file of one repeated line packs a thousandfold."""
_WINDOW_BYTES = 128 << 20
_SKIPPED = tuple(bytes([begin]) + b"\x2a\x4d\x18" for begin in range(0x50, 0x60))
"""How frames of Zstandard begin that hold no content."""
"""Of memory that a Zstandard frame may ask for."""


@dataclass(frozen=True)
class Damage:
    """Packed bytes that nothing could be unpacked from; zero where a file ends too early."""

    packed_bytes: int
    reason: str


@dataclass(frozen=True)
class _Codec:
    """One way of packing.

    Attributes:
        decoder: Makes a decoder of one member, with the calls of `zlib.decompressobj`.
        step: Packed bytes of one step, which become at most about 16 MiB.
    """

    decoder: Callable[[], Any]
    magic: bytes
    step: int
    errors: tuple[type[Exception], ...]


def _gzip_codec() -> _Codec:
    return _Codec(lambda: zlib.decompressobj(wbits=31), b"\x1f\x8b\x08", 16 << 10, (zlib.error,))


def _zlib_codec() -> _Codec:
    return _Codec(zlib.decompressobj, b"", 16 << 10, (zlib.error,))


def _deflate_codec() -> _Codec:
    return _Codec(lambda: zlib.decompressobj(wbits=-15), b"", 16 << 10, (zlib.error,))


def _zstandard_codec() -> _Codec:
    try:
        library = importlib.import_module("zstandard")
    except ImportError as exc:
        raise DataError("files packed as .zst need zstandard; install phalanx-train[data]") from exc

    def decoder() -> Any:
        return library.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompressobj()

    # four bytes can stand for a block of 128 KiB
    return _Codec(decoder, b"\x28\xb5\x2f\xfd", 512, (library.ZstdError,))


_BY_SUFFIX = {".gz": _gzip_codec, ".zst": _zstandard_codec}
_BY_CODING = {"gzip": _gzip_codec, "x-gzip": _gzip_codec, "deflate": _zlib_codec, "zstd": _zstandard_codec}


def is_packed(file: SourceFile) -> bool:
    """Whether the file's name says that it is packed."""
    return file.name.lower().endswith(tuple(_BY_SUFFIX))


def open_runs(file: SourceFile, max_ratio: int, borders: MemberBorders | None = None) -> Iterator[BinaryIO | Damage]:
    """Unpack a file, as its name says it is packed.

    Args:
        max_ratio: More unpacked bytes than so many times the packed ones are not given out, once there are 16 MiB.
        borders: Is told where members end, before a byte behind them is given out.

    Yields:
        Streams of unpacked bytes, each to be read to its end before the next; and what could not be unpacked.
        Behind damage a new stream begins with the next whole member of a gzip file. A file that is not packed is one
        stream.
    """
    packing = next((make for suffix, make in _BY_SUFFIX.items() if file.name.lower().endswith(suffix)), None)
    with file.open_bytes() as stream:
        try:
            if packing is None:
                # a store's own files read lines slowly
                yield stream if isinstance(stream, io.BufferedReader) else _buffer_stream(stream)
            else:
                yield from _Unpacker(stream, packing(), max_ratio, borders).unpack_runs()
        except client_errors() as exc:
            raise unreadable_error(file.path, exc) from exc


def unpack_bytes(content: bytes, coding: str, limit: int) -> bytes:
    """Unpack the body of a web page, every member of it; other bytes behind them are refused.

    Args:
        coding: Value of its header ``Content-Encoding``.
        limit: More bytes are not given out.
    """
    make = _BY_CODING.get(coding)
    if make is None:
        raise DataError(f"is packed as {coding[:40]!r}, which is not read here")
    codecs = [make()] if coding != "deflate" else [_zlib_codec(), _deflate_codec()]
    for codec in codecs:
        unpacked = _unpack_members(content, codec, coding, limit)
        if unpacked is not None:
            return unpacked
    raise DataError(f"its {coding} content is damaged")


def begins_packed(content: bytes, coding: str) -> bool:
    """Whether bytes may be packed so at all: recorders unpack bodies and leave the header that says so."""
    make = _BY_CODING.get(coding)
    if make is None or coding == "deflate":
        # neither deflate nor brotli has a mark; a page is text, and hardly anything packed begins like one
        return content.lstrip()[:1] != b"<"
    return content.startswith(make().magic) or content.startswith(_SKIPPED)


def _unpack_members(content: bytes, codec: _Codec, coding: str, limit: int) -> bytes | None:
    """Unpack every member or frame; None where the first one is damaged."""
    unpacked, position = bytearray(), 0
    while position < len(content):
        if position and content[position] == 0 and not content[position:].strip(b"\0"):
            # padding, as gzip allows it
            break
        if coding == "zstd" and content[position : position + 4] in _SKIPPED:
            # a frame that decoders of Zstandard pass over
            position += 8 + int.from_bytes(content[position + 4 : position + 8], "little")
            continue
        member = _unpack_member(content, position, codec, limit - len(unpacked))
        if member is None:
            if position == 0:
                return None
            raise DataError(
                f"has {len(content) - position} other bytes behind its {coding} content, or a damaged part of it"
            )
        unpacked += member[0]
        position = member[1]
    return bytes(unpacked)


def _unpack_member(content: bytes, at: int, codec: _Codec, limit: int) -> tuple[bytes, int] | None:
    """Unpack the member that begins at a place; return its bytes and where it ends."""
    decoder, unpacked = codec.decoder(), bytearray()
    try:
        for start in range(at, len(content), codec.step):
            fed = content[start : start + codec.step]
            unpacked += decoder.decompress(fed)
            if len(unpacked) > limit:
                raise DataError(f"unpacks to more than {limit} bytes; if it is right, raise max_record_bytes")
            if decoder.eof:
                return bytes(unpacked), start + len(fed) - len(decoder.unused_data)
    except codec.errors:
        return None
    return None


class _Unpacker:
    """Pieces of unpacked bytes, with an account of all packed ones."""

    def __init__(self, stream: BinaryIO, codec: _Codec, max_ratio: int, borders: MemberBorders | None) -> None:
        self._stream, self._codec, self._max_ratio = stream, codec, max_ratio
        self._borders = borders
        self._block, self._position = b"", 0
        self._decoder: Any = None
        self._packed = self._unpacked = 0
        self._damage: Damage | None = None
        self._is_over = False

    def unpack_runs(self) -> Iterator[BinaryIO | Damage]:
        """Yield a stream per undamaged run of members, and between two of them the damage, added up."""
        lost, reason = 0, ""
        while not self._is_over:
            first = self.next_piece()
            if first:
                if reason:
                    yield Damage(lost, reason)
                    lost, reason = 0, ""
                yield io.BufferedReader(_Run(self, first), _BLOCK_BYTES)
            if self._damage is not None:
                lost, reason = lost + self._damage.packed_bytes, reason or self._damage.reason
                self._damage = None
        if reason:
            yield Damage(lost, reason)

    def next_piece(self) -> bytes:
        """Some unpacked bytes; none at the end of a stream."""
        while self._damage is None and not self._is_over:
            if not self._fill_block():
                self._is_over = True
                if self._decoder is not None:
                    self._damage = Damage(0, "cannot be read (its packed data ends too early); fetch it again")
                return b""
            if self._decoder is None:
                self._decoder = self._codec.decoder()
            content = self._feed_decoder()
            if content:
                return content
        return b""

    def _feed_decoder(self) -> bytes:
        start, fed = self._position, self._block[self._position : self._position + self._codec.step]
        try:
            content: bytes = self._decoder.decompress(fed)
        except self._codec.errors as exc:
            self._decoder = None
            self._damage = Damage(self._seek_member(), f"cannot be read ({_error_reason(exc)}); fetch it again")
            return b""
        self._position = start + len(fed)
        is_over = self._decoder.eof
        if is_over:
            self._position -= len(self._decoder.unused_data)
            self._decoder = None
        self._packed += self._position - start
        self._unpacked += len(content)
        if is_over and self._borders is not None:
            self._borders.note_member(self._unpacked, self._stream.tell() - len(self._block) + self._position)
        if self._unpacked > max(_FREE_BYTES, self._max_ratio * self._packed):
            self._refuse_ratio()
        return content

    def _fill_block(self) -> bool:
        """Have packed bytes at hand, or say that there are none; zeros between gzip members are padding."""
        while True:
            if self._position >= len(self._block):
                self._block, self._position = self._stream.read(_BLOCK_BYTES), 0
            if self._decoder is None and self._block[self._position : self._position + 1] == b"\0":
                self._position = len(self._block) - len(self._block[self._position :].lstrip(b"\0"))
                continue
            return self._position < len(self._block)

    def _seek_member(self) -> int:
        """Go on to where the next member may begin; return how many packed bytes were passed over."""
        magic, passed, first = self._codec.magic, 0, self._position + 1
        while True:
            place = self._block.find(magic, first)
            if place >= 0:
                passed, self._position = passed + place - self._position, place
                return passed
            # the magic may lie across two blocks
            tail = self._block[max(first, len(self._block) - len(magic) + 1) :]
            more = self._stream.read(_BLOCK_BYTES)
            if not more:
                passed += len(self._block) - self._position
                self._block, self._position = b"", 0
                return passed
            passed += len(self._block) - len(tail) - self._position
            self._block, self._position, first = tail + more, 0, 0

    def _refuse_ratio(self) -> None:
        num_remaining = len(self._block) - self._position
        while more := self._stream.read(_BLOCK_BYTES):
            num_remaining += len(more)
        self._damage = Damage(
            num_remaining, f"unpacks to more than {self._max_ratio} times its size; if it is right, raise max_ratio"
        )
        self._is_over = True


class _Run(io.RawIOBase):
    """One stream of unpacked bytes."""

    def __init__(self, unpacker: _Unpacker, first: bytes) -> None:
        self._unpacker, self._piece = unpacker, memoryview(first)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if not self._piece:
            self._piece = memoryview(self._unpacker.next_piece())
        size = min(len(buffer), len(self._piece))
        buffer[:size] = self._piece[:size]
        self._piece = self._piece[size:]
        return size


def _buffer_stream(stream: Any) -> BinaryIO:
    return io.BufferedReader(stream, _BLOCK_BYTES)


def _error_reason(exc: Exception) -> str:
    return str(exc).lower().removeprefix("error -3 while decompressing data: ")[:100]
