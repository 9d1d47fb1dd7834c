"""The user's texts, cut into documents, some of which are held out."""

import hashlib
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter

from phalanx.data.sources import SourceConfig, open_source
from phalanx.errors import ConfigError, DataError
from phalanx.train.starter_sources import source_line, starter_rows

BLOCKS = re.compile(r"\n[ \t]*\n\s*")
"""What separates paragraphs: lines of white space are empty ones."""
MIN_BYTES = 20_000
MAX_BYTES = 256 << 20
"""More text than a processor of a laptop reads in a day."""
_DOCUMENT_CHARACTERS = 1500
_HELD_OUT_SHARE, _MIN_HELD_OUT, _MAX_HELD_OUT_BYTES = 0.05, 2, 150_000


@dataclass(frozen=True)
class CutTexts:
    """Documents of about 1,500 characters, each of them once.

    Attributes:
        train: Documents for training, in the order of the files.
        held_out: Documents that no phase learns from, drawn by their content.
        digest: SHA-256 over all documents, by which a later start knows the same texts.
        num_bytes: UTF-8 bytes of both.
        is_whole: Whether all of the texts were read; else the first `MAX_BYTES`.
    """

    train: tuple[str, ...]
    held_out: tuple[str, ...]
    digest: str
    num_bytes: int
    is_whole: bool

    @cached_property
    def train_bytes(self) -> int:
        """Count the UTF-8 bytes of the training documents."""
        return sum(len(text.encode()) for text in self.train)

    @property
    def held_out_bytes(self) -> int:
        """Count the UTF-8 bytes of the held-out documents."""
        return self.num_bytes - self.train_bytes


def read_texts(paths: Sequence[Path]) -> CutTexts:
    """Read files and folders of text, and cut them.

    Raises:
        ConfigError: They hold conversations or preferences, or are a dataset of shards.
        DataError: A path holds no text, or all of them hold less than `MIN_BYTES`.
    """
    rows = starter_rows(paths)
    if rows is not None and rows.layout != "chat":
        raise ConfigError(f"{paths[0]}: holds preferences; give them with --data-preferences, and texts beside them")
    documents: dict[str, None] = {}
    num_bytes, is_whole = 0, True
    for document in cut_documents(text for path in paths for text in _open_texts(path)):
        if document in documents:
            continue
        size_bytes = len(document.encode())
        if num_bytes + size_bytes > MAX_BYTES:
            is_whole = False
            break
        documents[document] = None
        num_bytes += size_bytes
    if num_bytes < MIN_BYTES:
        names = ", ".join(map(str, paths))
        raise DataError(
            f"{names}: {num_bytes:,} bytes of different text; a model needs at least {MIN_BYTES:,}, better some "
            "megabytes: add files"
        ).with_facts(code="PHX-I012", file=names, found=f"{num_bytes} bytes", expected=f"at least {MIN_BYTES} bytes")
    return _hold_out(tuple(documents), num_bytes, is_whole=is_whole)


def cut_documents(texts: Iterable[str]) -> Iterator[str]:
    """Yield parts of whole paragraphs; a text's last part may be short."""
    for text in texts:
        blocks: list[str] = []
        for block in BLOCKS.split(text.replace("\r\n", "\n").replace("\r", "\n").strip()):
            blocks.append(block.strip("\n"))
            if sum(map(len, blocks)) >= _DOCUMENT_CHARACTERS:
                yield "\n\n".join(blocks)
                blocks = []
        if any(block.strip() for block in blocks):
            yield "\n\n".join(blocks)


def _open_texts(path: Path) -> Iterator[str]:
    source_text, _ = source_line(path)
    section: dict[str, Any] = tomllib.loads(f"source = {{ {source_text} }}")["source"]
    # paragraphs are found here, with what stands above them
    section.pop("delimiter", None)
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[SourceConfig, ...])
    for document in open_source(adapter.validate_python({**section, "path": path})).documents():
        try:
            document.text.encode()
        except UnicodeEncodeError as exc:
            raise DataError(f"{document.name}: holds a lone surrogate, which is not text; repair it") from exc
        yield document.text


def _hold_out(documents: tuple[str, ...], num_bytes: int, *, is_whole: bool) -> CutTexts:
    digests = {document: hashlib.sha256(document.encode()).hexdigest() for document in documents}
    held_out: set[str] = set()
    held_bytes, limit = 0, min(_MAX_HELD_OUT_BYTES, num_bytes * _HELD_OUT_SHARE)
    for document in sorted(documents, key=digests.__getitem__):
        if held_bytes >= limit and len(held_out) >= _MIN_HELD_OUT:
            break
        held_out.add(document)
        held_bytes += len(document.encode())
    return CutTexts(
        tuple(document for document in documents if document not in held_out),
        tuple(document for document in documents if document in held_out),
        hashlib.sha256("".join(digests.values()).encode()).hexdigest(),
        num_bytes,
        is_whole,
    )
