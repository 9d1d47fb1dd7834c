"""Offline proofs: that a line is in a witnessed log, and that a log or a witness has spoken for two histories.

Source: C2SP tlog-proof as of July 2026 for the former; the latter is JSON of our own.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError

from phalanx.config import StrictModel, canonical_json
from phalanx.errors import AuditLogError
from phalanx.security.crypto import digest_hex
from phalanx.security.witness.notes import (
    MAX_NOTE_BYTES,
    NoteKey,
    SignedCheckpoint,
    decode_base64,
    decode_hash,
    encode_hash,
    parse_decimal,
)
from phalanx.security.witness.published import HistoryCopy
from phalanx.security.witness.tree import MAX_PROOF_HASHES, check_inclusion, hash_leaf

_FIRST_LINE = "c2sp.org/tlog-proof@v1"
MAX_PROOF_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class LineProof:
    """A line of an audit log with its place under a signed head."""

    line: bytes
    index: int
    path: tuple[bytes, ...]
    signed: SignedCheckpoint

    @classmethod
    def from_history(cls, history: HistoryCopy, signed: SignedCheckpoint, index: int, line: bytes) -> Self:
        """Prove one line."""
        if not 0 <= index < signed.checkpoint.head.size:
            raise AuditLogError(f"line {index + 1}: the head has {signed.checkpoint.head.size}")
        proof = cls(line, index, tuple(history.tree.prove_inclusion(index, signed.checkpoint.head.size)), signed)
        proof.check_place()
        return proof

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a proof file; nothing is checked but its form."""
        head, gap, note = data[:MAX_PROOF_BYTES].partition(b"\n\n")
        try:
            first, extra, index, *hashes = head.decode("ascii").split("\n")
        except ValueError as exc:
            raise AuditLogError("proof: is malformed, or lacks the line that it is of") from exc
        is_good = first == _FIRST_LINE and extra.startswith("extra ") and index.startswith("index ") and gap
        if not is_good or len(hashes) > MAX_PROOF_HASHES or len(data) > MAX_PROOF_BYTES:
            raise AuditLogError(f"proof: expected {_FIRST_LINE}, an extra line, an index and a path")
        path = tuple(decode_hash(text, "proof: path") for text in hashes)
        number = parse_decimal(index.removeprefix("index "), "proof: index")
        line = decode_base64(extra.removeprefix("extra "), "proof: extra")
        return cls(line, number, path, SignedCheckpoint.from_bytes(note))

    def to_bytes(self) -> bytes:
        """Return the proof file."""
        extra = base64.b64encode(self.line).decode("ascii")
        lines = [_FIRST_LINE, f"extra {extra}", f"index {self.index}", *map(encode_hash, self.path), "", ""]
        return "\n".join(lines).encode() + self.signed.to_bytes()

    def check_place(self) -> None:
        """Return when the line is at its place under the head; whose head it is remains to be judged by a policy."""
        entry = bytes.fromhex(digest_hex(self.line))
        check_inclusion(hash_leaf(entry), self.index, self.signed.checkpoint.head, self.path)


@dataclass(frozen=True)
class Contradiction:
    """Two statements of one key that cannot both be true.

    Attributes:
        kind: ``two histories``, or ``rolled back``: a smaller tree was called the largest later.
    """

    key: NoteKey
    kind: str
    text: str


class _ForkedLeaf(StrictModel):
    index: Annotated[int, Field(ge=0, le=2**63 - 1)]
    entries: tuple[str, str]
    paths: tuple[tuple[str, ...], tuple[str, ...]]


class ForkProof(StrictModel):
    """Two signed heads that contradict each other, for anybody who has the keys.

    Attributes:
        leaf: The first entry in which the histories differ, with its path to each root; None where the heads have one
            size and two roots, or where only times contradict.
    """

    format: Literal["phalanx-fork/1"] = "phalanx-fork/1"
    checkpoints: tuple[str, str]
    leaf: _ForkedLeaf | None = None

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a proof."""
        try:
            return cls.model_validate_json(data[: 4 * MAX_NOTE_BYTES])
        except ValidationError as exc:
            raise AuditLogError("fork proof: is malformed") from exc

    def to_bytes(self) -> bytes:
        """Return the proof file."""
        fields: dict[str, Any] = self.model_dump(mode="json")
        return canonical_json(fields) + b"\n"

    def judge_signers(self, keys: Sequence[NoteKey]) -> list[Contradiction]:
        """Name every key that signed both heads although they contradict each other; empty where nobody did."""
        first, second = (SignedCheckpoint.from_bytes(text.encode()) for text in self.checkpoints)
        if first.checkpoint.origin != second.checkpoint.origin:
            raise AuditLogError("fork proof: its heads are of two logs")
        heads = first.checkpoint.head, second.checkpoint.head
        differs = heads[0].size == heads[1].size and heads[0].root != heads[1].root
        if self.leaf is not None:
            self._check_leaf(self.leaf, first, second)
            differs = True
        times = first.check_signatures(keys), second.check_signatures(keys)
        contradictions = []
        for key in [key for key in times[0] if key in times[1]]:
            origin, when = first.checkpoint.origin, (times[0][key], times[1][key])
            if differs:
                text = f"{key.name} signed two histories of {origin}: {_describe_heads(first, second)}"
                contradictions.append(Contradiction(key, "two histories", text))
            elif (when[0] - when[1]) * (heads[0].size - heads[1].size) < 0 and all(when):
                text = (
                    f"{key.name} rolled {origin} back: {_describe_heads(first, second)}, at {when[0]} and {when[1]} s"
                )
                contradictions.append(Contradiction(key, "rolled back", text))
        return contradictions

    @staticmethod
    def _check_leaf(leaf: _ForkedLeaf, *signed: SignedCheckpoint) -> None:
        entries = [decode_base64(text, "fork proof: entry") for text in leaf.entries]
        if entries[0] == entries[1]:
            raise AuditLogError("fork proof: its entries are equal")
        for entry, texts, one in zip(entries, leaf.paths, signed, strict=True):
            path = [decode_hash(text, "fork proof: path") for text in texts[: MAX_PROOF_HASHES + 1]]
            check_inclusion(hash_leaf(entry), leaf.index, one.checkpoint.head, path)


def compare_histories(
    first: tuple[SignedCheckpoint, HistoryCopy | None], second: tuple[SignedCheckpoint, HistoryCopy | None]
) -> ForkProof:
    """Return the proof that two heads contradict each other, as far as these copies can show it.

    A reader that has no entries gives None: then equal sizes and the times of cosignatures are all that is compared.
    """
    heads = [one[0].checkpoint.head for one in (first, second)]
    texts = (first[0].to_bytes().decode(), second[0].to_bytes().decode())
    if heads[0].size == heads[1].size or first[1] is None or second[1] is None:
        return ForkProof(checkpoints=texts)
    copies = first[1], second[1]
    pairs = enumerate(zip(copies[0].entries, copies[1].entries, strict=False))
    index = next((index for index, (one, other) in pairs if one != other), None)
    if index is None:
        return ForkProof(checkpoints=texts)
    encoded = [base64.b64encode(copy.entries[index]).decode("ascii") for copy in copies]
    paths = [
        tuple(map(encode_hash, copy.tree.prove_inclusion(index, head.size)))
        for copy, head in zip(copies, heads, strict=True)
    ]
    leaf = _ForkedLeaf(index=index, entries=(encoded[0], encoded[1]), paths=(paths[0], paths[1]))
    return ForkProof(checkpoints=texts, leaf=leaf)


def _describe_heads(*signed: SignedCheckpoint) -> str:
    return " and ".join(
        f"{one.checkpoint.head.size} entries with root {one.checkpoint.head.root.hex()[:16]}" for one in signed
    )
