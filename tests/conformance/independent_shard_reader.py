"""A reader of datasets written from docs/shards.md alone: it imports nothing of Phalanx."""

import hashlib
import json
import struct
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF


class RefusedError(Exception):
    """What the page says must be refused."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise RefusedError(what)


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def in_domain(domain: str, data: bytes) -> bytes:
    return b"phalanx/" + domain.encode() + b"\0" + data


def root(hashes: list[bytes]) -> bytes:
    if len(hashes) < 2:
        return hashes[0] if hashes else hashlib.sha256().digest()
    left = 1
    while left * 2 < len(hashes):
        left *= 2
    return hashlib.sha256(b"\1" + root(hashes[:left]) + root(hashes[left:])).digest()


def leaf(data: bytes) -> bytes:
    return hashlib.sha256(b"\0" + data).digest()


def check_signature(key: str, signature: str, data: bytes) -> None:
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(bytes.fromhex(signature), data)
    except InvalidSignature as exc:
        raise RefusedError("signature") from exc


class Reader:
    """A dataset that is not encrypted."""

    def __init__(self, home: Path, signer: str) -> None:
        self.home = home
        content = (home / "dataset.json").read_bytes()
        envelope = json.loads(content)
        require(canonical(envelope) == content, "canonical form")
        require(set(envelope) == {"body", "index_signature", "signature", "signer"}, "keys")
        require(envelope["signer"] == signer, "signer")
        self.body = envelope["body"]
        check_signature(signer, envelope["signature"], in_domain("dataset-manifest/1", canonical(self.body)))
        self.digest = hashlib.sha256(canonical(self.body)).hexdigest()
        self.statement = {
            "dataset": self.digest,
            "documents": self.body["documents"],
            "index": self.body["index"]["root"],
            "parts": [[part["group"], part["split"]] for part in self.body["parts"]],
        }
        check_signature(signer, envelope["index_signature"], in_domain("dataset-index/1", canonical(self.statement)))
        for count in ("documents", "tokens"):
            for several in ("parts", "sources"):
                require(sum(one[count] for one in self.body[several]) == self.body[count], f"{count} of {several}")

    def read(self, file: str, record: dict) -> bytes:
        """Return all content of a file, checked."""
        content, tree = (self.home / file).read_bytes(), (self.home / f"{file}.tree").read_bytes()
        require(len(content) == record["size_bytes"], f"{file}: size")
        size = self.body["leaf_bytes"]
        hashes = [tree[at : at + 32] for at in range(0, len(tree), 32)]
        require(len(hashes) == -(-len(content) // size), f"{file}: leaves")
        require(root(hashes).hex() == record["root"], f"{file}: root")
        for number, expected in enumerate(hashes):
            require(leaf(content[number * size : (number + 1) * size]) == expected, f"{file}: leaf {number}")
        return content

    def documents(self, number: int) -> list[dict]:
        """Return every document of a part."""
        part = self.body["parts"][number]
        home, width = f"shards/{part['group']}.{part['split']}", int(self.body["dtype"][2])
        content = b"".join(
            self.read(f"{home}/tokens-{shard:05}", record) for shard, record in enumerate(part["shards"])
        )
        require(len(content) == part["tokens"] * width, "tokens")
        tokens = struct.unpack(f"<{part['tokens']}{'H' if width == 2 else 'I'}", content)
        require(max(tokens) < self.body["tokenizer"]["vocab_size"], "vocabulary")
        starts = struct.unpack(f"<{part['documents'] + 1}Q", self.read(f"{home}/starts", part["starts"]))
        records, entries = (self.read(f"{home}/{name}", part[name]) for name in ("records", "entries"))
        found = []
        for document in range(part["documents"]):
            digest, source, size, begin = struct.unpack_from("<32sIIQ", records, 48 * document)
            entry = json.loads(entries[begin : begin + size])
            ids = list(tokens[starts[document] : starts[document + 1]])
            found.append({"digest": digest.hex(), "source": source, "start": starts[document], "tokens": ids, **entry})
        return found

    def check_index(self) -> None:
        """Compare the index with the documents of all parts."""
        rows = sorted(
            (bytes.fromhex(one["digest"]), part, number, one["source"], one["start"], len(one["tokens"]))
            for part in range(len(self.body["parts"]))
            for number, one in enumerate(self.documents(part))
        )
        expected = [
            struct.pack("<32sIIQQQ", digest, part, source, number, start, tokens)
            for digest, part, number, source, start, tokens in rows
        ]
        index = self.body["index"]
        require(self.read("shards/index/table", index["table"]) == b"".join(expected), "index")
        hashes = [leaf(record) for record in expected]
        nodes = [root(hashes[at : at + 1024]) for at in range(0, len(hashes), 1024)]
        require(self.read("shards/index/nodes", index["nodes"]) == b"".join(nodes), "nodes")
        require(root(hashes).hex() == index["root"] == root(nodes).hex(), "root of the index")


def check_proof(proof: dict, signer: str) -> list[tuple[str, str, int]]:
    """Return group, split and number of all places of a document; none where it is proven to be absent."""
    statement, digest = proof["statement"], bytes.fromhex(proof["digest"])
    require(proof["signer"] == signer, "signer")
    check_signature(signer, proof["signature"], in_domain("dataset-index/1", canonical(statement)))
    records = [bytes.fromhex(one["record"]) for one in proof["leaves"]]
    numbers = [one["number"] for one in proof["leaves"]]
    require(numbers == list(range(numbers[0], numbers[0] + len(numbers))), "not in a row")
    for record, one in zip(records, proof["leaves"], strict=True):
        node, at, last = leaf(record), one["number"], statement["documents"] - 1
        path = [bytes.fromhex(sibling) for sibling in one["path"]]
        while last:
            if at % 2 or at < last:
                sibling = path.pop(0)
                node = hashlib.sha256(b"\1" + (sibling + node if at % 2 else node + sibling)).digest()
            at, last = at // 2, last // 2
        require(not path and node.hex() == statement["index"], "path")
    require(records == sorted(records, key=lambda record: record[:32]), "order")
    require(numbers[0] == 0 or records[0][:32] < digest, "the record before")
    require(numbers[-1] == statement["documents"] - 1 or records[-1][:32] > digest, "the record behind")
    places = [struct.unpack("<32sIIQQQ", record) for record in records if record[:32] == digest]
    return [(*statement["parts"][part], number) for _, part, _, number, _, _ in places]


def derive(data_key: bytes, dataset: str, *about: str) -> bytes:
    info = in_domain("dataset-file-key/1", canonical(list(about)))
    return HKDF(SHA256(), 32, bytes.fromhex(dataset), info).derive(data_key)


def open_leaf(data_key: bytes, dataset: str, file: str, number: int, stored: bytes) -> bytes:
    key, about = derive(data_key, dataset, "file", file), canonical([dataset, file, number])
    return AESGCM(key).decrypt(number.to_bytes(12, "big"), stored, in_domain("dataset-leaf/1", about))


def unwrap(content: bytes, wrapping_key: bytes, dataset: str) -> bytes:
    record = json.loads(content)
    require(set(record) == {"key", "version", "wrapped"} and record["version"] == 1, "wrapped key")
    wrapped = bytes.fromhex(record["wrapped"])
    return AESGCM(wrapping_key).decrypt(wrapped[:12], wrapped[12:], in_domain("dataset-key/1", canonical([dataset])))
