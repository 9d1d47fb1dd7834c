"""A dataset made of files of other tools: Parquet with lists of tokens, or Megatron's pairs of files."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from phalanx.data.manifest import TokenizerRecord
from phalanx.data.shards.manifest import (
    DatasetFacts,
    DatasetManifest,
    RecipeRecord,
    SourceFacts,
)
from phalanx.data.shards.megatron import open_megatron
from phalanx.data.shards.parquet import TokenRow, read_parquet
from phalanx.data.shards.records import DocumentEntry
from phalanx.data.shards.writer import DatasetWriter
from phalanx.errors import DataError
from phalanx.security.crypto import Identity, in_domain

_ENDINGS: dict[str, Literal["parquet", "megatron"]] = {".parquet": "parquet", ".idx": "megatron", ".bin": "megatron"}


@dataclass(frozen=True)
class TokenFile:
    """A file of tokens of another tool, by name ``GROUP.SPLIT.parquet`` or ``GROUP.SPLIT.idx`` with its ``.bin``."""

    path: Path
    kind: Literal["parquet", "megatron"]
    group: str
    split: str

    @classmethod
    def from_path(cls, path: Path) -> "TokenFile":
        """Read its name."""
        kind, parts = _ENDINGS.get(path.suffix), path.stem.split(".")
        if kind is None or len(parts) != 2:
            raise DataError(
                f"{path}: expected GROUP.SPLIT.parquet, or GROUP.SPLIT.idx with its .bin beside it; rename it, for "
                "example to web.train.parquet"
            )
        return cls(path, kind, parts[0], parts[1])

    @property
    def content_files(self) -> tuple[Path, ...]:
        """All files that the tokens lie in."""
        if self.kind == "parquet":
            return (self.path,)
        return self.path.with_suffix(".bin"), self.path.with_suffix(".idx")

    def token_rows(self) -> Iterator[TokenRow]:
        """Yield every document."""
        if self.kind == "parquet":
            yield from read_parquet(self.path)
            return
        for ids in open_megatron(self.path.with_suffix("")).read_documents():
            yield TokenRow(ids, None, None, {})


@dataclass(frozen=True)
class ForeignTokens:
    """What a person says of tokens that another tool made."""

    files: Sequence[TokenFile]
    tokenizer: TokenizerRecord
    licence: str = ""
    consent: str = ""


def import_tokens(foreign: ForeignTokens, writer: DatasetWriter, signer: Identity) -> DatasetManifest:
    """Make a dataset of tokens that another tool made; each file becomes a source.

    Where a file has no digest of a document, the document is known by `tokens_digest`.
    """
    for number, file in enumerate(foreign.files):
        part = writer.part_writer(file.group, file.split)
        for row_number, row in enumerate(file.token_rows()):
            name = row.name if row.name is not None else f"{file.path.name}/{row_number}"
            digest = row.digest if row.digest is not None else tokens_digest(row.ids)
            part.add_document(row.ids, DocumentEntry(digest, number, name, row.fields))
    facts = DatasetFacts(
        sources=tuple(
            SourceFacts(
                name=file.path.name,
                kind=file.kind,
                fingerprint=_fingerprint_files(file.content_files),
                licence=foreign.licence,
                consent=foreign.consent,
            )
            for file in foreign.files
        ),
        tokenizer=foreign.tokenizer,
        recipe=RecipeRecord.from_content("# tokens of another tool, unchanged\n"),
        tools={"phalanx": version("phalanx-train"), "numpy": np.__version__},
    )
    return writer.finish_dataset(facts, signer)


def tokens_digest(ids: NDArray[Any]) -> str:
    """Return the digest of a document of which only tokens are known: SHA-256 in hex over 4 bytes of each."""
    return hashlib.sha256(in_domain("dataset-tokens/1", ids.astype("<u4").tobytes())).hexdigest()


def _fingerprint_files(paths: Sequence[Path]) -> str:
    total = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as stream:
                total.update(hashlib.file_digest(stream, "sha256").digest())
        except OSError as exc:
            raise DataError(f"{path}: cannot be read ({exc.strerror})") from exc
    return total.hexdigest()
