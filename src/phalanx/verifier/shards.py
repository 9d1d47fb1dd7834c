"""Datasets of docs/shards.md: the signed manifest, every file with its tree, the index, and proofs about documents."""

import hashlib
import json
import operator
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .forms import (
    DIGEST,
    Member,
    RefusedError,
    canonical,
    check_signature,
    is_plain_path,
    parse,
    require,
    root_from_path,
    sha256,
    shard_leaf,
    shard_root,
)

MANIFEST_FILE = "dataset.json"
MAX_MANIFEST_BYTES = 64 * 2**20
MAX_PROOF_BYTES = 4 * 2**20
_INDEX_RECORD = struct.Struct("<32sIIQQQ")
_DOCUMENT_RECORD = struct.Struct("<32sIIQ")
_NODE_RECORDS = 1024


@dataclass(frozen=True)
class SignedManifest:
    """A manifest with signatures that hold.

    Attributes:
        digest: SHA-256 that names the dataset.
        signer: Key that signed it; compare it with the key that you expect.
        statement: Statement about the index alone, signed by the same key.
    """

    body: dict[str, Any]
    digest: str
    signer: str
    statement: dict[str, Any]


def read_manifest(data: bytes, signer: str | None = None) -> SignedManifest:
    """Check the signatures and sums of a manifest.

    Args:
        signer: Fingerprint of the key that must have signed it; None accepts any.

    Raises:
        RefusedError: It is malformed, altered, or signed by another key.
    """
    try:
        envelope = parse(data)
        require(set(envelope) == {"body", "index_signature", "signature", "signer"}, "its keys")
        body, key = envelope["body"], _read_key(envelope["signer"], signer)
        check_signature(key, envelope["signature"], "dataset-manifest/1", canonical(body))
        statement = {
            "dataset": sha256(canonical(body)),
            "documents": body["documents"],
            "index": body["index"]["root"],
            "parts": [[part["group"], part["split"]] for part in body["parts"]],
        }
        check_signature(key, envelope["index_signature"], "dataset-index/1", canonical(statement))
        for count in ("documents", "tokens"):
            for rows in ("parts", "sources"):
                require(sum(row[count] for row in body[rows]) == body[count], f"{count} of its {rows} do not add up")
        recipe = body["recipe"]
        require(sha256(recipe["content"].encode()) == recipe["digest"], "its recipe has another digest")
    except (RefusedError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise RefusedError(f"no manifest of a dataset, or altered: {exc}") from exc
    return SignedManifest(body, statement["dataset"], envelope["signer"], statement)


def _read_key(stated: str, expected: str | None) -> bytes:
    require(DIGEST.fullmatch(stated) is not None, "the signer is no key")
    require(expected in (None, stated), f"signed with key {stated}, expected {expected}")
    return bytes.fromhex(stated)


class DatasetReader:
    """A dataset in a directory, not encrypted; every byte that is returned was checked."""

    def __init__(self, home: Path, signer: str | None = None) -> None:
        self.home = home
        self.manifest = read_manifest(Member.from_file(home / MANIFEST_FILE).read_all(MAX_MANIFEST_BYTES), signer)
        self.body = self.manifest.body
        require(self.body.get("seal") is None, f"{home}: is encrypted: `phalanx data verify` checks it with its key")

    def read_file(self, file: str, record: Mapping[str, Any]) -> bytes:
        """Return the content of a file after comparing every leaf and the root."""
        size, leaf_bytes = record["size_bytes"], self.body["leaf_bytes"]
        count = -(-size // leaf_bytes)
        tree = Member.from_file(self.home / f"{file}.tree").read_all(2**32)
        stored = Member.from_file(self.home / file)
        require((stored.size, len(tree)) == (size, 32 * count), f"{file}: size, or number of leaves")
        hashes = [tree[begin : begin + 32] for begin in range(0, len(tree), 32)]
        require(shard_root(hashes).hex() == record["root"], f"{file}: root")
        content = bytearray()
        for number, expected in enumerate(hashes):
            leaf = stored.read_range(number * leaf_bytes, min(leaf_bytes, size - number * leaf_bytes))
            require(shard_leaf(leaf) == expected, f"{file}: leaf {number}")
            content += leaf
        return bytes(content)

    def read_documents(self, number: int) -> Iterator[dict[str, Any]]:
        """Yield every document of a part: digest, source, start, tokens, name and fields."""
        part = self.body["parts"][number]
        home, width = f"shards/{part['group']}.{part['split']}", int(self.body["dtype"][2])
        shards = [self.read_file(f"{home}/tokens-{shard:05}", record) for shard, record in enumerate(part["shards"])]
        content = b"".join(shards)
        require(len(content) == part["tokens"] * width, f"{home}: tokens")
        tokens = struct.unpack(f"<{part['tokens']}{'H' if width == 2 else 'I'}", content)
        require(max(tokens, default=0) < self.body["tokenizer"]["vocab_size"], f"{home}: vocabulary")
        starts = struct.unpack(f"<{part['documents'] + 1}Q", self.read_file(f"{home}/starts", part["starts"]))
        is_rising = starts[0] == 0 and starts[-1] == part["tokens"] and all(map(operator.le, starts, starts[1:]))
        require(is_rising, f"{home}/starts: does not rise from 0 to {part['tokens']}")
        records, entries = (self.read_file(f"{home}/{name}", part[name]) for name in ("records", "entries"))
        for document in range(part["documents"]):
            name, source, size, begin = _DOCUMENT_RECORD.unpack_from(records, 48 * document)
            entry = json.loads(entries[begin : begin + size])
            ids = list(tokens[starts[document] : starts[document + 1]])
            yield {**entry, "digest": name.hex(), "source": source, "start": starts[document], "tokens": ids}

    def check_all(self) -> None:
        """Check every file of the dataset, and compare the index with the documents of all parts."""
        parts = [f"{part['group']}.{part['split']}" for part in self.body["parts"]]
        require(len(set(parts)) == len(parts), "a part is there twice")
        rows = sorted(
            (bytes.fromhex(document["digest"]), part, number, document["source"], document["start"],
             len(document["tokens"]))
            for part in range(len(self.body["parts"]))
            for number, document in enumerate(self.read_documents(part))
        )  # fmt: skip
        records = [
            _INDEX_RECORD.pack(name, part, source, number, start, tokens)
            for name, part, number, source, start, tokens in rows
        ]
        index = self.body["index"]
        require(self.read_file("shards/index/table", index["table"]) == b"".join(records), "index")
        hashes = [shard_leaf(record) for record in records]
        nodes = [shard_root(hashes[begin : begin + _NODE_RECORDS]) for begin in range(0, len(hashes), _NODE_RECORDS)]
        require(self.read_file("shards/index/nodes", index["nodes"]) == b"".join(nodes), "nodes of the index")
        require(shard_root(hashes).hex() == index["root"] == shard_root(nodes).hex(), "root of the index")
        for name, record in self.body["files"].items():
            require(is_plain_path(name), f"{name}: is outside, or has a second name")
            file = Member.from_file(self.home / name)
            require((file.size, file.hash_content()) == (record["size_bytes"], record["sha256"]), f"{name}: changed")


@dataclass(frozen=True)
class PlaceProof:
    """What a proof about one document shows.

    Attributes:
        statement: Signed statement about the index, as in the manifest.
        places: Group, split and number of each of its places; none: it is nowhere in the dataset.
        is_complete: Whether there are no further places.
    """

    digest: str
    statement: dict[str, Any]
    signer: str
    places: tuple[tuple[str, str, int], ...]
    is_complete: bool


def check_proof(data: bytes, signer: str | None = None) -> PlaceProof:
    """Check a proof of ``phalanx data where --proof``, without the dataset.

    Raises:
        RefusedError: It proves nothing.
    """
    try:
        require(len(data) <= MAX_PROOF_BYTES, "too long")
        return _check_leaves(parse(data.removesuffix(b"\n")), signer)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as exc:
        raise RefusedError(f"no proof about a document, or altered: {exc}") from exc


def _check_leaves(proof: Mapping[str, Any], signer: str | None) -> PlaceProof:
    statement, document = proof["statement"], bytes.fromhex(proof["digest"])
    require(proof["format"] == "phalanx-document-proof" and proof["version"] == 1, "of another format")
    key = _read_key(proof["signer"], signer)
    check_signature(key, proof["signature"], "dataset-index/1", canonical(statement))
    records = [bytes.fromhex(leaf["record"]) for leaf in proof["leaves"]]
    numbers = [leaf["number"] for leaf in proof["leaves"]]
    count = statement["documents"]
    require(bool(numbers) and numbers == list(range(numbers[0], numbers[0] + len(numbers))), "records are missing")
    for record, leaf in zip(records, proof["leaves"], strict=True):
        path = [bytes.fromhex(node) for node in leaf["path"]]
        root = root_from_path(shard_leaf(record), leaf["number"], count, path)
        require(root.hex() == statement["index"], f"record {leaf['number']} is not in the index")
    digests = [record[:32] for record in records]
    require(digests == sorted(digests), "its records are not in order")
    begins = numbers[0] == 0 or digests[0] < document
    ends = numbers[-1] == count - 1 or digests[-1] > document
    rows = [_INDEX_RECORD.unpack(record) for record in records]
    places = tuple((*statement["parts"][part], number) for name, part, _, number, _, _ in rows if name == document)
    require(bool(places) or (begins and ends), "the records on both sides of the digest are missing")
    return PlaceProof(proof["digest"], statement, proof["signer"], places, begins and ends)


def source_corpus_digest(files: dict[str, Any], data: dict[str, Any]) -> str | None:
    """Return the digest of a corpus that a run made of its sources; None where the files beside its tokens name none.

    `files` are those of the signed manifest, `data` is the section of the run file.
    """
    packing, length = str(data.get("packing", "concatenate")), int(data.get("sequence_length", 0))
    if "manifest.json" in files:
        return corpus_digest(str(files["manifest.json"]["sha256"]), packing, length)
    if "conversations.json" in files:
        turns = f"{data.get('attention', 'across')} {length} {files['conversations.json']['sha256']}"
        return corpus_digest(hashlib.sha256(turns.encode()).hexdigest(), packing, length)
    return None


def corpus_digest(dataset: str, packing: str, sequence_length: int) -> str:
    """Return the digest of a corpus as a run's log names it, from a dataset and how its documents are packed."""
    if packing == "concatenate":
        return dataset
    return hashlib.sha256(f"{packing} {sequence_length} {dataset}".encode()).hexdigest()
