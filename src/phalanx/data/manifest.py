"""The manifest of a packed corpus, with counts that add up; a signature covers its digest."""

from typing import Literal

from pydantic import Field, ValidationError

from phalanx.config import StrictModel
from phalanx.errors import DataError

FORMAT: Literal[1] = 1
_HEX = r"^[0-9a-f]{64}$"


class SourceCounts(StrictModel):
    """The counts of one source, kept and dropped; sizes in bytes of cleaned UTF-8 text."""

    kind: str
    fingerprint: str = Field(pattern=_HEX)
    documents: int = Field(ge=0)
    size_bytes: int = Field(ge=0)
    empty_documents: int = Field(ge=0)
    duplicate_documents: int = Field(ge=0)
    duplicate_bytes: int = Field(ge=0)


class TokenizerRecord(StrictModel):
    """The tokenizer that made the tokens; `digest` is the SHA-256 of ``tokenizer.json``."""

    kind: str
    vocab_size: int = Field(ge=1)
    eos_id: int = Field(ge=0)
    digest: str = Field(pattern=_HEX)


class SplitRecord(StrictModel):
    """One token file.

    Attributes:
        tokens: All tokens in the file, one end of text per document included.
        sequences: Windows of ``sequence_length + 1`` tokens with stride ``sequence_length``.
        left_over_tokens: Tokens at the end that fill no window.
        digest: SHA-256 of the file.
    """

    documents: int = Field(ge=0)
    size_bytes: int = Field(ge=0)
    tokens: int = Field(ge=0)
    sequences: int = Field(ge=0)
    left_over_tokens: int = Field(ge=0)
    digest: str = Field(pattern=_HEX)


class CorpusManifest(StrictModel):
    """Everything about a corpus but its tokens; no path and no time, so equal data has equal digests."""

    format: Literal[1] = FORMAT
    key: str = Field(pattern=_HEX)
    seed: int
    sequence_length: int = Field(ge=2)
    token_dtype: Literal["<u2", "<u4"]
    sources: tuple[SourceCounts, ...]
    tokenizer: TokenizerRecord
    train: SplitRecord
    validation: SplitRecord


def count_sequences(tokens: int, sequence_length: int) -> tuple[int, int]:
    """Windows that fit into so many tokens, and the tokens that are left over at the end."""
    sequences = max(0, (tokens - 1) // sequence_length)
    used = sequences * sequence_length + 1 if sequences else 0
    return sequences, tokens - used


def parse_manifest(content: bytes, where: str) -> CorpusManifest:
    """Read a manifest and check that it adds up from documents and bytes to packed tokens."""
    try:
        manifest = CorpusManifest.model_validate_json(content)
    except ValidationError as exc:
        first = exc.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "(whole file)"
        raise DataError(f"{where}: {key}: {first['msg']}; delete the directory to make it again") from exc
    _check_sums(manifest, where)
    return manifest


def _check_sums(manifest: CorpusManifest, where: str) -> None:
    sources, splits = manifest.sources, (manifest.train, manifest.validation)
    num_kept = sum(s.documents - s.empty_documents - s.duplicate_documents for s in sources)
    kept_bytes = sum(s.size_bytes - s.duplicate_bytes for s in sources)
    sums = [
        ("documents", num_kept, sum(split.documents for split in splits)),
        ("bytes", kept_bytes, sum(split.size_bytes for split in splits)),
    ]
    for name, split in zip(("train", "validation"), splits, strict=True):
        sequences, left_over = count_sequences(split.tokens, manifest.sequence_length)
        sums.append((f"{name} sequences", sequences, split.sequences))
        sums.append((f"{name} left-over tokens", left_over, split.left_over_tokens))
    for name, expected, actual in sums:
        if expected != actual:
            raise DataError(
                f"{where}: {name} do not add up: expected {expected}, found {actual}; delete the directory to make "
                "it again"
            )
