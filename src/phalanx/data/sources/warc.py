"""Web archives: WARC, and the WET archives of plain text.

Records are cut apart here and parsed by fastwarc one at a time: so that each byte of a file is in one record, the
next one is found behind a broken one, and no record is unpacked without a bound ([ADR 106]).
"""

import base64
import binascii
import hashlib
import importlib
import importlib.metadata
import io
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, ClassVar, Literal

from phalanx.data.sources.charsets import codec_of
from phalanx.data.sources.extraction import PageSettings, TextExtractor
from phalanx.data.sources.packed import begins_packed, unpack_bytes
from phalanx.data.sources.records import (
    FileSettings,
    Gap,
    RawRecord,
    RecordClaims,
    StreamFiles,
    broken_record,
    document_of,
    recorded_text,
)
from phalanx.data.sources.source import BrokenRecord, Document
from phalanx.errors import DataError

_VERSION = re.compile(rb"WARC/\d\.\d{1,2}\r?\n")
_LENGTH = re.compile(rb"^content-length:[ \t]*(\d{1,18})[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
_HEAD_BYTES = 64 << 10
_BLOCK_BYTES = 1 << 20
_LINE_END = re.compile(rb"(?:\r?\n)*")
_ENDS = (b"\r\n\r\n", b"\n\n")
_XHTML = "application/xhtml+xml"
_PAGES = ("text/html", _XHTML)
_PLAIN = "text/plain"
_NO_CODINGS = frozenset({"", "identity", "none", "null", "text", "plain", "8bit", "7bit", "binary", "chunked"})
"""What servers write where nothing is packed; names of charsets are about as well."""
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]{0,8192})?\r?\n")
_CHUNK_END = re.compile(rb"\r?\n")
_TRAILERS = re.compile(rb"(?:[^\r\n:]{1,256}:[^\r\n]{0,8192}\r?\n){0,64}\r?\n")
_DIGESTS = {"md5": "md5", "sha1": "sha1", "sha-1": "sha1", "sha256": "sha256", "sha-256": "sha256", "sha512": "sha512"}


class WarcConfig(FileSettings, PageSettings):
    """Web archives, a file or a directory of ``*.warc`` and ``*.wet`` (also ``.gz``, ``.zst``); needs `data`.

    Pages and plain texts that came with status 200 give documents, and so do the texts of WET archives.
    """

    kind: Literal["warc"] = "warc"


class WarcFiles(StreamFiles):
    """One record per record of the archive: its header, its block and the two line ends behind it."""

    _UNIT: ClassVar = "record"

    def __init__(self, config: WarcConfig) -> None:
        self._extractor = TextExtractor("warc", config)
        try:
            self._parse: Any = importlib.import_module("fastwarc.warc").ArchiveIterator
        except ImportError as exc:
            raise DataError("source kind 'warc' needs fastwarc; install phalanx-train[data]") from exc
        super().__init__(config, (".warc", ".wet"))

    def _library_versions(self) -> list[str]:
        return [*self._extractor.library_versions(), f"fastwarc {importlib.metadata.version('fastwarc')}"]

    def _cut_stream(self, stream: BinaryIO, limit: int) -> Iterator[bytes | int | Gap]:
        return _cut_archive(stream, limit)

    def _make_document(self, record: RawRecord) -> Document | BrokenRecord:
        parsed, body = self._parse_record(record)
        kind, headers = str(parsed.record_type), parsed.headers
        if kind not in ("response", "resource", "conversion"):
            return broken_record(record, f"{kind} record", is_unsupported=True)
        raw_body = body
        media, charset = _parse_media_type(headers.get("Content-Type") or "")
        if parsed.is_http_parsed:
            status = parsed.http_headers.status_code
            if status != 200:
                return broken_record(record, f"HTTP status {status}", is_unsupported=True)
            media, charset = _parse_media_type(parsed.http_headers.get("Content-Type") or "")
        if media not in (*_PAGES, _PLAIN):
            return broken_record(record, f"content of type {media[:60] or 'unknown'}", is_unsupported=True)
        if parsed.is_http_parsed:
            body = self._http_body(record, parsed.http_headers, body)
        claims = _claims_of(headers, kind, raw_body)
        if media == _PLAIN:
            declared = "utf-8" if kind == "conversion" else charset
            return document_of(record, self._extractor.decode_page(body, declared, record.name, is_page=False), claims)
        text = self._extractor.extract_text(body, charset, record.name, is_xhtml=media == _XHTML)
        return document_of(record, text, claims)

    def _parse_record(self, record: RawRecord) -> tuple[Any, bytes]:
        try:
            for parsed in self._parse(io.BytesIO(record.content), parse_http=True, auto_decode="none"):
                return parsed, parsed.reader.read()
        except Exception as exc:
            # whatever a parser of foreign bytes raises
            raise DataError(f"{record.name}: fastwarc cannot read it ({str(exc)[:80]})") from exc
        raise DataError(f"{record.name}: fastwarc finds no record in it")

    def _http_body(self, record: RawRecord, headers: Any, body: bytes) -> bytes:
        """Put a body together and unpack it, where it still is as its headers say."""
        try:
            if "chunked" in (headers.get("Transfer-Encoding") or "").lower():
                body = _joined_chunks(body)
            codings = [coding.strip().lower() for coding in (headers.get("Content-Encoding") or "").split(",")]
            for coding in reversed(codings):
                if coding not in _NO_CODINGS and codec_of(coding) is None and begins_packed(body, coding):
                    body = unpack_bytes(body, coding, self._limits.max_record_bytes)
        except DataError as exc:
            raise DataError(f"{record.name}: {exc}") from exc
        return body


def _joined_chunks(body: bytes) -> bytes:
    """Join the chunks of a body; one that does not begin as a chunk was joined when it was recorded."""
    parts: list[bytes] = []
    position = 0
    while (head := _CHUNK.match(body, position)) is not None:
        size = int(head[1], 16)
        if size == 0:
            trailers = _TRAILERS.match(body, head.end())
            rest = body[head.end() if trailers is None else trailers.end() :]
            if rest.strip(b"\r\n"):
                raise DataError(f"has {len(rest)} other bytes behind its last chunk")
            return b"".join(parts)
        chunk = body[head.end() : head.end() + size]
        parts.append(chunk)
        position = head.end() + size
        if len(chunk) < size or not (line_end := _CHUNK_END.match(body, position)):
            raise DataError(f"its chunk {len(parts)} ends too early, or is no chunk")
        position = line_end.end()
    if parts:
        raise DataError(f"ends behind chunk {len(parts)}, which is not the last one")
    return body


def _cut_archive(stream: BinaryIO, limit: int) -> Iterator[bytes | int | Gap]:
    """Cut a stream into records; of one that is longer than `limit` the size alone."""
    row = stream.readline(_HEAD_BYTES)
    while row:
        if not _VERSION.fullmatch(row):
            size, row = _skip_to_record(stream, row)
            yield Gap(size, "is not where a WARC record begins")
            continue
        head, row = _read_header_block(stream, row)
        lengths = _LENGTH.findall(head)
        if row or len(lengths) != 1:
            size, row = _skip_to_record(stream, row or stream.readline(_HEAD_BYTES))
            yield Gap(len(head) + size, "has no header that ends, with one Content-Length")
            continue
        length = int(lengths[0])
        block, size = _read_block(stream, length, limit - len(head))
        if size < length:
            yield Gap(len(head) + size, f"ends too early: its length is {length}, found {size} bytes")
            return
        separator, passed, row = _read_block_end(stream)
        size_bytes = len(head) + length + len(separator) + passed
        if (row or passed) and separator not in _ENDS:
            size, row = _skip_to_record(stream, row)
            yield Gap(size_bytes + size, "its length is not that of its content")
        elif block is None:
            yield size_bytes
        else:
            yield head + block + separator


def _read_header_block(stream: BinaryIO, row: bytes) -> tuple[bytes, bytes]:
    """Read one header block. Return (complete header, b'') or (partial header, offending line)."""
    lines, size = [row], len(row)
    while row := stream.readline(_HEAD_BYTES):
        if _VERSION.fullmatch(row):
            return b"".join(lines), row
        lines.append(row)
        size += len(row)
        if row in (b"\r\n", b"\n"):
            return b"".join(lines), b""
        if size > _HEAD_BYTES:
            break
    # a header that does not end has no length that counts
    return b"".join(lines).replace(b":", b"."), b""


def _read_block(stream: BinaryIO, length: int, limit: int) -> tuple[bytes | None, int]:
    if length <= limit:
        block = stream.read(length)
        return block, len(block)
    size = 0
    while size < length and (piece := stream.read(min(_BLOCK_BYTES, length - size))):
        size += len(piece)
    return None, size


def _read_block_end(stream: BinaryIO) -> tuple[bytes, int, bytes]:
    """The line ends behind a block, the number of further bytes, and the next line."""
    tail = stream.read(4)
    if tail == b"\r\n\r\n":
        return tail, 0, stream.readline(_HEAD_BYTES)
    ends = _LINE_END.match(tail)
    ending = ends[0] if ends else b""
    last = tail[len(ending) :].rpartition(b"\n")[2]
    return ending, len(tail) - len(ending) - len(last), last + stream.readline(_HEAD_BYTES)


def _skip_to_record(stream: BinaryIO, row: bytes) -> tuple[int, bytes]:
    """Return the size in bytes up to the next line that begins a record, and that line."""
    size = 0
    while row and not _VERSION.fullmatch(row):
        size += len(row)
        row = stream.readline(_HEAD_BYTES)
    return size, row


def _parse_media_type(value: str) -> tuple[str, str | None]:
    media, _, rest = value.partition(";")
    charset = re.search(r"charset\s{0,9}=\s{0,9}[\"']?([\w.:-]{1,40})", rest[:1000], re.IGNORECASE)
    return media.strip().lower(), charset[1].lower() if charset else None


def _claims_of(headers: Any, kind: str, body: bytes) -> RecordClaims:
    digest = recorded_text(headers.get("WARC-Payload-Digest"), max_characters=200)
    if digest is None and kind == "conversion":
        # the block of such a record is its payload
        digest = recorded_text(headers.get("WARC-Block-Digest"), max_characters=200)
    # for scans that compare what was fetched with what others recorded
    fields = {"payload_sha256": hashlib.sha256(body).hexdigest()}
    name = _DIGESTS.get(digest.partition(":")[0].strip().lower()) if digest else None
    if name:
        fields[f"payload_{name}"] = hashlib.new(name, body, usedforsecurity=False).hexdigest()
    if truncated := recorded_text(headers.get("WARC-Truncated"), max_characters=40):
        fields["truncated"] = truncated
    url = recorded_text(headers.get("WARC-Target-URI"), max_characters=8000)
    return RecordClaims(
        url=url.strip("<>") if url else None,
        fetched_at=recorded_text(headers.get("WARC-Date"), max_characters=40),
        digest=digest,
        digest_holds=_digest_matches(digest, bytes.fromhex(fields[f"payload_{name}"])) if digest and name else None,
        fields=fields,
    )


def _digest_matches(digest: str, actual: bytes) -> bool:
    value = digest.partition(":")[2].strip()
    try:
        if len(value) == 2 * len(actual):
            return bytes.fromhex(value) == actual
        return base64.b32decode(value.rstrip("=").upper() + "=" * (-len(value.rstrip("=")) % 8)) == actual
    except (binascii.Error, ValueError):
        return False
