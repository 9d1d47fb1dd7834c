"""Mail: mailboxes (mbox) and single messages (EML)."""

import contextlib
import email
import email.errors
import email.header
import email.message
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, ClassVar, Literal

from pydantic import Field

from phalanx.data.sources.extraction import PageSettings, TextExtractor
from phalanx.data.sources.files import SourceFile
from phalanx.data.sources.records import (
    FileSettings,
    RawRecord,
    RecordClaims,
    StreamFiles,
    break_torn_records,
    broken_record,
    document_of,
    read_bounded_line,
)
from phalanx.data.sources.source import BrokenRecord, Document
from phalanx.errors import DataError

_BEGIN = b"From "
_MAX_PARTS = 1000
_MAX_BOUNDARIES = 64
_MAX_TYPE_BYTES = 4096
"""Of one header Content-Type: Python takes its parameters apart in quadratic time, 146 KB of quotes in 9 s."""
_MAX_BORDERS = 50_000
"""Lines that may begin a part, of which each costs some 50 us and a kilobyte."""
_TYPE = re.compile(rb"(?i)(?:^|[\r\n])content-type:[^\r\n]*(?:(?:\r\n|\r|\n)[ \t][^\r\n]*)*")
_HEADER_CHARACTERS = 1000
_QUOTED_BEGIN = re.compile(rb"(?m)^>(>*From )")
_PLAIN = ("text/plain", "text/markdown", "text/x-markdown")
_UTF_7 = ("utf-7", "unicode-1-1-utf-7")
_SIGNATURE = "-- "
"""The line above a signature; its space marks no broken line."""
_BLANK = " \t\r\n\f\v\u00a0\u200b\u2060\ufeff"
"""Characters of a part that shows nothing."""


class MailConfig(FileSettings, PageSettings):
    """Mail, a file or a directory of ``*.eml`` and ``*.mbox`` (also ``.gz``, ``.zst``); needs the extra `html`.

    Attributes:
        headers: Written above the text, and kept as fields, where a message has them; addresses are personal data.
        suffixes: Suffixes of the files below a directory; ``[""]`` takes every file, as of a Maildir.
    """

    kind: Literal["mail"] = "mail"
    headers: tuple[str, ...] = ("Subject",)
    suffixes: tuple[str, ...] = Field(default=(".eml", ".mbox"), min_length=1)


class MailFiles(StreamFiles):
    """One record per message; in a mailbox, from its line ``From `` to the next one behind a blank line."""

    _UNIT: ClassVar = "message"

    def __init__(self, config: MailConfig) -> None:
        self._extractor = TextExtractor("mail", config)
        super().__init__(config, config.suffixes)
        self._config = config

    def _library_versions(self) -> list[str]:
        return self._extractor.library_versions()

    def _cut_records(self, file: SourceFile, name: str) -> Iterator[RawRecord | BrokenRecord]:
        return break_torn_records(super()._cut_records(file, name), name, None)

    def _cut_stream(self, stream: BinaryIO, limit: int) -> Iterator[bytes | int]:
        return _cut_messages(stream, limit)

    def _make_document(self, record: RawRecord) -> Document | BrokenRecord:
        content = record.content.removeprefix(b"\xef\xbb\xbf")
        if content.startswith(_BEGIN):
            # what a mailbox puts before a line that would begin the next message
            content = _QUOTED_BEGIN.sub(rb"\1", content.partition(b"\n")[2])
        try:
            message = _parse_message(content, record.name)
            headers = {name: self._decode_header(message, name, record.name) for name in self._config.headers}
            text = self._shown_text(message, record.name)
        except DataError:
            raise
        except Exception as exc:
            # whatever a parser of foreign bytes raises
            raise DataError(f"{record.name}: is no message that can be read ({type(exc).__name__})") from exc
        if text is None:
            return broken_record(record, "a message without text", is_unsupported=True)
        above = "\n".join(f"{name}: {value}" for name, value in headers.items() if value)
        fields = {name.lower(): value for name, value in headers.items() if value}
        return document_of(record, f"{above}\n\n{text}" if above else text, RecordClaims(fields=fields))

    def _shown_text(self, message: email.message.Message, where: str) -> str | None:
        if sum(1 for _ in zip(message.walk(), range(_MAX_PARTS + 1), strict=False)) > _MAX_PARTS:
            raise DataError(f"{where}: has more than {_MAX_PARTS} parts")
        shown = self._shown_part(message, where)
        return None if shown is None else shown.text

    def _shown_part(self, part: email.message.Message, where: str) -> "_Shown | None":
        """What a part shows: of alternatives the best, of others all plain texts, else the first page."""
        if part.get_content_disposition() == "attachment":
            return None
        kind = part.get_content_type()
        if part.is_multipart():
            inner = (
                self._shown_part(message, where)
                for message in part.get_payload()
                if isinstance(message, email.message.Message)
            )
            shown_parts = [part_shown for part_shown in inner if part_shown is not None]
            texts = [part_shown for part_shown in shown_parts if not part_shown.is_page]
            if kind == "multipart/alternative":
                # one of them is shown, as a text among others would be
                best = next(iter(texts or shown_parts), None)
                return None if best is None else _Shown(best.text)
            shown = texts or shown_parts[:1]
            return (
                _Shown("\n\n".join(part_shown.text.strip("\n") for part_shown in shown), not texts) if shown else None
            )
        if kind not in (*_PLAIN, "text/html"):
            return None
        content, charset = _content_of(part)
        if kind == "text/html":
            text = self._extractor.extract_text(content, charset, where) if content.strip() else ""
            return _Shown(text, is_page=True) if text.strip(_BLANK) else None
        if charset in _UTF_7:
            # which browsers do not know, and programs for mail have sent
            text = content.decode("utf-7")
        else:
            text = self._extractor.decode_page(content, charset, where, is_page=False)
        text = text.replace("\r\n", "\n")
        if str(part.get_param("format", "")).lower() == "flowed":
            text = _join_flowed(text, deletes_space=str(part.get_param("delsp", "")).lower() == "yes")
        return _Shown(text) if text.strip(_BLANK) else None

    def _decode_header(self, message: email.message.Message, name: str, where: str) -> str:
        raw = next((str(value) for header, value in message.raw_items() if header.lower() == name.lower()), "")
        value = raw[:_HEADER_CHARACTERS]
        if not value.isascii():
            content = value.encode("utf-8", "surrogateescape")
            value = self._extractor.decode_page(content, None, where, is_page=False)
        # a header that cannot be decoded is shown as it stands
        with contextlib.suppress(LookupError, ValueError, email.errors.HeaderParseError):
            value = str(email.header.make_header(email.header.decode_header(value)))
        return " ".join(value.split()).encode("utf-8", "replace").decode()


@dataclass(frozen=True)
class _Shown:
    """Text of a part.

    Attributes:
        is_page: Whether it was taken out of a page, and is left out beside plain text.
    """

    text: str
    is_page: bool = False


def _cut_messages(stream: BinaryIO, limit: int) -> Iterator[bytes | int]:
    """Messages of a mailbox, or the whole stream where it does not begin as one; of a longer one its size alone."""
    lines: list[bytes] = []
    size, is_mailbox, is_behind_blank = 0, False, True
    while row := read_bounded_line(stream, limit):
        length = row if isinstance(row, int) else len(row)
        begins = isinstance(row, bytes) and row.startswith(_BEGIN)
        if begins and size == 0:
            is_mailbox = True
        elif begins and is_mailbox and is_behind_blank:
            yield b"".join(lines) if size <= limit else size
            lines, size = [], 0
        size += length
        if isinstance(row, int) or size > limit:
            lines = []
        else:
            lines.append(row)
        is_behind_blank = row in (b"\n", b"\r\n")
    if size:
        yield b"".join(lines) if size <= limit else size


def _parse_message(content: bytes, where: str) -> email.message.Message:
    _check_cost(content, where)
    message = email.message_from_bytes(content)
    if not message.keys():
        raise DataError(f"{where}: is no message: it has no header")
    return message


def _check_cost(content: bytes, where: str) -> None:
    """Refuse a message that costs Python's parser much more than its size."""
    lower = content.lower()
    if lower.count(b"boundary=") > _MAX_BOUNDARIES:
        # each one nests, and all are looked for in each line
        raise DataError(f"{where}: has more than {_MAX_BOUNDARIES} boundaries")
    if any(len(header[0]) > _MAX_TYPE_BYTES for header in _TYPE.finditer(content)):
        raise DataError(f"{where}: has a header Content-Type of more than {_MAX_TYPE_BYTES} bytes")
    borders = [(b"multipart/", (b"\n--", b"\r--")), (b"message/delivery-status", (b"\n\n", b"\n\r\n", b"\r\r"))]
    if sum(content.count(border) for kind, begins in borders if kind in lower for border in begins) > _MAX_BORDERS:
        raise DataError(f"{where}: has more than {_MAX_BORDERS} lines that may begin a part")


def _join_flowed(text: str, *, deletes_space: bool) -> str:
    """Join the lines of a paragraph that a program has broken, as `format=flowed` marks them (RFC 3676)."""
    lines: list[tuple[int, str]] = []
    is_open = False
    for row in text.split("\n"):
        plain = row.lstrip(">")
        depth = len(row) - len(plain)
        plain = plain.removeprefix(" ")
        if is_open and lines[-1][0] == depth and plain != _SIGNATURE:
            begin = lines[-1][1]
            lines[-1] = (depth, (begin[:-1] if deletes_space else begin) + plain)
        else:
            lines.append((depth, plain))
        is_open = plain.endswith(" ") and plain != _SIGNATURE
    return "\n".join(f"{'>' * depth} {plain}" if depth else plain for depth, plain in lines)


def _content_of(part: email.message.Message) -> tuple[bytes, str | None]:
    content = part.get_payload(decode=True)
    return content if isinstance(content, bytes) else b"", part.get_content_charset()
