"""Proofs about one document: where a signed dataset has it, or that it does not; checked without the dataset."""

import pathlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError

from phalanx.config import StrictModel, canonical_json
from phalanx.data.shards.dataset import Dataset
from phalanx.data.shards.index import record_hashes
from phalanx.data.shards.leaves import Count, Digest
from phalanx.data.shards.manifest import BLOCK_RECORDS, INDEX_BYTES, IndexStatement, verify_statement
from phalanx.data.shards.merkle import abbreviate_digests, audit_path, leaf_hash, root_from_path
from phalanx.data.shards.records import INDEX
from phalanx.errors import DataError
from phalanx.security.crypto import parse_canonical

MAX_PROOF_BYTES = 4 * 2**20
_MAX_PLACES = 256
_DIGEST = re.compile(r"[0-9a-f]{64}")

Record = Annotated[str, Field(pattern=r"^[0-9a-f]{128}\z")]
AuditPath = Annotated[tuple[Digest, ...], Field(max_length=64)]


class ProofLeaf(StrictModel):
    """One record of the index, and the way from it to the root."""

    number: Count
    record: Record
    path: AuditPath


class DocumentProof(StrictModel):
    """Consecutive records: those with a digest, and one neighbour on either side, between which no other record is.

    Attributes:
        statement: The signer's statement about the index.
        leaves: In the order of their numbers.
    """

    format: Literal["phalanx-document-proof"] = "phalanx-document-proof"
    version: Literal[1] = 1
    digest: Digest
    statement: IndexStatement
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}\z")]
    signer: Digest
    leaves: Annotated[tuple[ProofLeaf, ...], Field(min_length=1, max_length=_MAX_PLACES + 2)]

    def to_bytes(self) -> bytes:
        """Return the proof as a file has it."""
        return canonical_json(self.model_dump(mode="json")) + b"\n"


@dataclass(frozen=True)
class DocumentPlace:
    """One place of a document in a dataset."""

    group: str
    split: str
    source: int
    document: int
    start: int
    tokens: int


@dataclass(frozen=True)
class ProvenPlaces:
    """What a proof proves, provided that its signer keeps the index in order.

    Attributes:
        places: Places of the document; none: it is nowhere in the dataset.
    """

    places: tuple[DocumentPlace, ...]
    is_complete: bool


def prove_document(dataset: Dataset, digest: str) -> DocumentProof:
    """Prove where a dataset has a document, or that it does not.

    Args:
        dataset: Open; the index is read, tokens are not.
    """
    if _DIGEST.fullmatch(digest) is None:
        raise DataError(f"digest {digest[:80]!r}: expected 64 characters of 0-9 and a-f")
    wanted_digest, count = bytes.fromhex(digest), dataset.manifest.documents
    first = _first_record_from(dataset, wanted_digest)
    stop = first
    while stop < count and stop - first < _MAX_PLACES and _digest_at(dataset, stop) == wanted_digest:
        stop += 1
    numbers = range(max(0, first - 1), min(count, stop + 1))
    return DocumentProof(
        digest=digest,
        statement=dataset.statement,
        signature=dataset.statement_signature,
        signer=dataset.signer,
        leaves=_proof_leaves(dataset, numbers),
    )


def read_proof(content: bytes, where: str) -> DocumentProof:
    """Read a proof."""
    try:
        if len(content) > MAX_PROOF_BYTES:
            raise ValueError(f"has more than {MAX_PROOF_BYTES} bytes")  # noqa: TRY301
        parse_canonical(content.removesuffix(b"\n"))
        return DocumentProof.model_validate_json(content)
    except ValidationError as exc:
        first = exc.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise _proof_error(where, f"{place}: {first['msg']}") from exc
    except ValueError as exc:
        raise _proof_error(where, str(exc)) from exc


def load_proof(path: pathlib.Path) -> DocumentProof:
    """Read the file of a proof."""
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_PROOF_BYTES + 1)
    except OSError as exc:
        raise DataError(f"{path}: cannot be read ({exc.strerror}); give a proof file").with_facts(
            code="PHX-I029"
        ) from exc
    return read_proof(content, str(path))


def check_proof(proof: DocumentProof, where: str, signer: str | None = None) -> ProvenPlaces:
    """Describe the places that a proof proves."""
    statement, wanted_digest = proof.statement, bytes.fromhex(proof.digest)
    verify_statement(statement, proof.signature, proof.signer, where, signer)
    numbers = [leaf.number for leaf in proof.leaves]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise _proof_error(where, f"records {numbers[:10]} are not consecutive")
    for leaf in proof.leaves:
        path = [bytes.fromhex(node) for node in leaf.path]
        try:
            root = root_from_path(leaf_hash(bytes.fromhex(leaf.record)), leaf.number, statement.documents, path).hex()
        except ValueError as exc:
            raise _proof_error(where, f"record {leaf.number}: {exc}") from exc
        if root != statement.index:
            has, expects = abbreviate_digests(root, statement.index)
            raise _proof_error(where, f"record {leaf.number} leads to root {has}, not {expects}")
    records = np.frombuffer(b"".join(bytes.fromhex(leaf.record) for leaf in proof.leaves), INDEX)
    digests = [record["digest"].tobytes() for record in records]
    if digests != sorted(digests):
        raise _proof_error(where, "its records are not in the order of their digests")
    begins = numbers[0] == 0 or digests[0] < wanted_digest
    ends = numbers[-1] == statement.documents - 1 or digests[-1] > wanted_digest
    matches = [record for record, digest in zip(records, digests, strict=True) if digest == wanted_digest]
    if not matches and not (begins and ends):
        raise _proof_error(where, "the records on both sides of the digest are missing")
    return ProvenPlaces(tuple(_document_place(record, statement, where) for record in matches), begins and ends)


def _document_place(record: Any, statement: IndexStatement, where: str) -> DocumentPlace:
    part = int(record["part"])
    if part >= len(statement.parts):
        raise _proof_error(where, f"a record names part {part} of {len(statement.parts)}")
    group, split = statement.parts[part]
    numbers = (int(record[name]) for name in ("source", "document", "start", "tokens"))
    return DocumentPlace(group, split, *numbers)


def _first_record_from(dataset: Dataset, wanted: bytes) -> int:
    """Return the number of the first record with a digest that is not smaller."""
    low, high = 0, dataset.manifest.documents
    while low < high:
        middle = (low + high) // 2
        if _digest_at(dataset, middle) < wanted:
            low = middle + 1
        else:
            high = middle
    return low


def _digest_at(dataset: Dataset, number: int) -> bytes:
    return bytes(dataset.index_table().read_items(number, number + 1)["digest"].tobytes())


def _proof_leaves(dataset: Dataset, numbers: Sequence[int]) -> tuple[ProofLeaf, ...]:
    table, nodes = dataset.index_table(), [node.tobytes() for node in dataset.index_nodes().read_all()]
    upper: dict[int, list[bytes]] = {}
    leaves: list[ProofLeaf] = []
    hashes: list[bytes] = []
    for number in numbers:
        block, within = divmod(number, BLOCK_RECORDS)
        start = block * BLOCK_RECORDS
        records = table.read_items(start, min(start + BLOCK_RECORDS, table.num_items)).tobytes()
        if block not in upper:
            upper[block], hashes = audit_path(nodes, block), record_hashes(records)
        path = audit_path(hashes, within) + upper[block]
        record = records[within * INDEX_BYTES : (within + 1) * INDEX_BYTES]
        leaves.append(ProofLeaf(number=number, record=record.hex(), path=tuple(node.hex() for node in path)))
    return tuple(leaves)


def _proof_error(where: str, why: str) -> DataError:
    return DataError(f"{where}: proves nothing: {why}; ask for it again").with_facts(code="PHX-I029")
