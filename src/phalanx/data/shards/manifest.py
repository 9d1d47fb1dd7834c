"""The signed manifest of a dataset: its sources, its tools, and the root of every file."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from phalanx.config import StrictModel, canonical_json
from phalanx.data.manifest import TokenizerRecord
from phalanx.data.shards.leaves import Count, Digest, FileRoot
from phalanx.data.shards.merkle import HASH_BYTES
from phalanx.data.shards.seal import FINGERPRINT, SealRecord, fingerprint_of, signer_of
from phalanx.errors import DataError, SignatureError
from phalanx.security.crypto import Identity, in_domain, parse_canonical

DATASET_FILE = "dataset.json"
MAX_MANIFEST_BYTES = 64 * 2**20
DOCUMENT_BYTES, INDEX_BYTES, BLOCK_RECORDS = 48, 64, 1024
"""Of one record of a part's documents and of the index; index records under one stored node."""
_DOMAIN, _INDEX_DOMAIN = "dataset-manifest/1", "dataset-index/1"
_SIGNATURE = re.compile(r"[0-9a-f]{128}")

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}\z")]
Text = Annotated[str, Field(max_length=4096)]
LeafBytes = Annotated[int, Field(ge=2**8, le=2**20, multiple_of=2**8)]


class SourceFacts(StrictModel):
    """One source of the documents, as its recipe and its reader tell.

    Attributes:
        fingerprint: SHA-256 over everything that decides which documents came out.
        licence: Under which its texts may be used; empty where nothing is known.
        consent: Consent of the people in it, in the recipe's words; empty where nothing is known.
    """

    name: Text
    kind: Text
    fingerprint: Digest
    licence: Text = ""
    consent: Text = ""


class SourceRecord(SourceFacts):
    """One source, with its share in the shards."""

    documents: Count
    tokens: Count


class RecipeRecord(StrictModel):
    """The resolved recipe: every rule, threshold and default; `digest` is the SHA-256 of `content` in UTF-8."""

    digest: Digest
    content: Annotated[str, Field(max_length=2**20)]

    @classmethod
    def from_content(cls, content: str) -> "RecipeRecord":
        """Return the record of a recipe's text."""
        return cls(digest=hashlib.sha256(content.encode()).hexdigest(), content=content)


class ParentRecord(StrictModel):
    """A dataset that this one was made from.

    Attributes:
        signer: Fingerprint of the key that signed it.
        relation: Relation to it: ``filtered``, ``merged``, ``encrypted``.
    """

    digest: Digest
    signer: Digest
    relation: Text


class BesideRecord(StrictModel):
    """A further file of the dataset's directory; `sha256` as ``sha256sum`` prints it."""

    size_bytes: Count
    sha256: Digest


class PartRecord(StrictModel):
    """One split of one group.

    Attributes:
        shards: Token files, all of the same number of tokens but the last.
        starts: Start of every document, and the number of tokens, 8 bytes each.
        records: Digest, source and place of the entry of every document.
        entries: Name and fields of every document.
    """

    group: Name
    split: Name
    documents: Count
    tokens: Count
    shards: Annotated[tuple[FileRoot, ...], Field(max_length=2**20)]
    starts: FileRoot
    records: FileRoot
    entries: FileRoot

    @property
    def shard_directory(self) -> str:
        """Where its files are, in the dataset."""
        return part_directory(self.group, self.split)


class IndexRecord(StrictModel):
    """All documents in the order of their digests.

    Attributes:
        root: Root of the tree that has each record for a leaf.
        nodes: Nodes of that tree, one for every 1,024 records.
    """

    root: Digest
    table: FileRoot
    nodes: FileRoot


class DatasetFacts(StrictModel):
    """What a build knows of a dataset beside its tokens.

    Attributes:
        sources: In the order of the numbers that documents give.
        tools: Versions by the name of the library or program.
        files: Further files of the directory that the signature covers, such as reports; paths in it.
    """

    sources: Annotated[tuple[SourceFacts, ...], Field(min_length=1, max_length=2**16)]
    tokenizer: TokenizerRecord
    recipe: RecipeRecord
    tools: dict[Name, Text] = Field(default_factory=dict)
    parents: Annotated[tuple[ParentRecord, ...], Field(max_length=2**12)] = ()
    files: Annotated[tuple[Text, ...], Field(max_length=2**16)] = ()


class DatasetManifest(StrictModel):
    """Everything that a dataset is; no path of a machine and no time, so equal data has equal digests."""

    format: Literal["phalanx-dataset"] = "phalanx-dataset"
    version: Literal[1] = 1
    dtype: Literal["<u2", "<u4"]
    shard_tokens: Annotated[int, Field(ge=1, le=2**40)]
    leaf_bytes: LeafBytes
    documents: Count
    tokens: Count
    tokenizer: TokenizerRecord
    sources: Annotated[tuple[SourceRecord, ...], Field(min_length=1, max_length=2**16)]
    recipe: RecipeRecord
    tools: Annotated[dict[Name, Text], Field(max_length=2**10)]
    parents: Annotated[tuple[ParentRecord, ...], Field(max_length=2**12)]
    files: Annotated[dict[Text, BesideRecord], Field(max_length=2**16)]
    parts: Annotated[tuple[PartRecord, ...], Field(min_length=1, max_length=2**16)]
    index: IndexRecord
    seal: SealRecord | None = None


class IndexStatement(StrictModel):
    """What a signer says of the index alone, so that a proof about one document needs no manifest.

    Attributes:
        parts: Group and split of each part, in the order of the numbers that records give.
    """

    dataset: Digest
    documents: Count
    index: Digest
    parts: Annotated[tuple[tuple[Name, Name], ...], Field(min_length=1, max_length=2**16)]

    @classmethod
    def from_manifest(cls, manifest: DatasetManifest) -> "IndexStatement":
        """Return the statement of a manifest."""
        return cls(
            dataset=dataset_digest(manifest),
            documents=manifest.documents,
            index=manifest.index.root,
            parts=tuple((part.group, part.split) for part in manifest.parts),
        )

    def signed_bytes(self) -> bytes:
        """Return the signed bytes."""
        return in_domain(_INDEX_DOMAIN, canonical_json(self.model_dump(mode="json")))


@dataclass(frozen=True)
class SignedDataset:
    """A verified manifest."""

    manifest: DatasetManifest
    signer: str
    statement: IndexStatement
    statement_signature: str


def part_directory(group: str, split: str) -> str:
    """Return where the files of one split of one group are, in the dataset."""
    return f"shards/{group}.{split}"


def manifest_body(manifest: DatasetManifest) -> bytes:
    """Return the signed body; its SHA-256 is the digest of the dataset."""
    return canonical_json(manifest.model_dump(mode="json", exclude_none=True))


def dataset_digest(manifest: DatasetManifest) -> str:
    """Return the SHA-256 in hex that names this dataset and no other."""
    return hashlib.sha256(manifest_body(manifest)).hexdigest()


def sign_dataset(manifest: DatasetManifest, signer: Identity) -> bytes:
    """Return the bytes of ``dataset.json``: canonical JSON with Ed25519 signatures over its body and its index."""
    body = manifest.model_dump(mode="json", exclude_none=True)
    return canonical_json(
        {
            "body": body,
            "index_signature": signer.sign_data(IndexStatement.from_manifest(manifest).signed_bytes()).hex(),
            "signature": signer.sign_data(in_domain(_DOMAIN, canonical_json(body))).hex(),
            "signer": fingerprint_of(signer),
        }
    )


def verify_dataset(data: bytes, where: Path, signer: str | None = None) -> SignedDataset:
    """Check the signatures of a manifest, then read it.

    Args:
        data: Bytes of ``dataset.json``.
        signer: Fingerprint of the key that must have signed; None: any key, the caller tells which.
    """
    try:
        envelope = parse_canonical(data)
    except ValueError as exc:
        raise _altered_error(where, str(exc)) from exc
    if set(envelope) != {"body", "index_signature", "signature", "signer"}:
        raise _altered_error(
            where, f"found keys {sorted(envelope)!s:.200}, expected body, index_signature, signature and signer"
        )
    body, key, signature = envelope["body"], envelope["signer"], envelope["signature"]
    _check_signature(in_domain(_DOMAIN, canonical_json(body)), signature, key, str(where), signer)
    manifest = _read_body(body, where)
    _check_sums(manifest, where)
    statement, signature = IndexStatement.from_manifest(manifest), envelope["index_signature"]
    verify_statement(statement, signature, key, str(where), signer)
    return SignedDataset(manifest, key, statement, signature)


def verify_statement(statement: IndexStatement, signature: str, found: str, where: str, signer: str | None) -> None:
    """Check that the key `found` signed a statement about an index, and is the required one."""
    _check_signature(statement.signed_bytes(), signature, found, where, signer)


def _check_signature(data: bytes, signature: Any, key: Any, where: str, signer: str | None) -> None:
    if not _matches_pattern(FINGERPRINT, key) or not _matches_pattern(_SIGNATURE, signature):
        raise _altered_error(where, "signer or signature is not a text of 64 or 128 characters 0-9 and a-f")
    if signer is not None and signer_of(signer) != signer_of(key):
        raise DataError(
            f"{where}: signed with key {key}, expected {signer}; use a dataset of that signer, or name this key "
            "if a source that you trust confirms its fingerprint"
        ).with_facts(code="PHX-I028", found=key, expected=signer)
    try:
        signer_of(key).verify_signature(bytes.fromhex(signature), data)
    except SignatureError as exc:
        raise _altered_error(where, f"the signature of key {key} does not match") from exc


def _matches_pattern(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _read_body(body: Any, where: Path) -> DatasetManifest:
    try:
        return DatasetManifest.model_validate_json(canonical_json(body))
    except ValidationError as exc:
        first = exc.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{where}: {place}: found {first['input']!r:.80}: {first['msg']}").with_facts(
            code="PHX-I027"
        ) from exc


def _check_sums(manifest: DatasetManifest, where: Path) -> None:
    """Check that counts add up and sizes follow from them."""
    item = int(manifest.dtype[2:])
    sums = [
        ("documents of the sources", sum(source.documents for source in manifest.sources), manifest.documents),
        ("documents of the parts", sum(part.documents for part in manifest.parts), manifest.documents),
        ("tokens of the sources", sum(source.tokens for source in manifest.sources), manifest.tokens),
        ("tokens of the parts", sum(part.tokens for part in manifest.parts), manifest.tokens),
        ("bytes of the index", manifest.index.table.size_bytes, INDEX_BYTES * manifest.documents),
        (
            "bytes of the index's nodes",
            manifest.index.nodes.size_bytes,
            HASH_BYTES * -(-manifest.documents // BLOCK_RECORDS),
        ),
        ("parts of different names", len({(part.group, part.split) for part in manifest.parts}), len(manifest.parts)),
    ]
    for part in manifest.parts:
        place = f"{part.group}.{part.split}"
        sums += [
            (f"shards of {place}", len(part.shards), -(-part.tokens // manifest.shard_tokens)),
            (f"bytes of the starts of {place}", part.starts.size_bytes, 8 * (part.documents + 1)),
            (f"bytes of the records of {place}", part.records.size_bytes, DOCUMENT_BYTES * part.documents),
        ]
        sums += [
            (
                f"bytes of shard {number} of {place}",
                shard.size_bytes,
                item * min(manifest.shard_tokens, part.tokens - number * manifest.shard_tokens),
            )
            for number, shard in enumerate(part.shards)
        ]
    for name, actual, expected in sums:
        if actual != expected:
            raise DataError(
                f"{where}: {name}: found {actual}, expected {expected}; build the dataset again"
            ).with_facts(code="PHX-I027")
    if manifest.recipe != RecipeRecord.from_content(manifest.recipe.content):
        raise DataError(f"{where}: recipe: the digest does not match its content; build the dataset again")
    if manifest.leaf_bytes & (manifest.leaf_bytes - 1):
        raise DataError(f"{where}: leaf_bytes: found {manifest.leaf_bytes}, expected a power of two")


def _altered_error(where: Path | str, what: str) -> DataError:
    return DataError(
        f"{where}: altered or damaged: {what}; restore it from a copy, or build the dataset again"
    ).with_facts(code="PHX-I027")
