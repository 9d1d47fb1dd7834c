"""The policy file of a reader: which logs and witnesses are trusted, and how many witnesses must have cosigned.

Source: C2SP tlog-policy as of July 2026.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import AuditLogError
from phalanx.security.witness.notes import NoteKey, SignatureKind, SignedCheckpoint, parse_decimal

MAX_POLICY_BYTES = 1024 * 1024
_BLANKS = re.compile(r"[ \t]+")
_NONE = "none"


@dataclass(frozen=True)
class PolicyParty:
    """A log or a witness of a policy."""

    name: str
    key: NoteKey
    url: str = ""


@dataclass(frozen=True)
class _Group:
    threshold: int
    members: tuple[str, ...]


@dataclass(frozen=True)
class QuorumStatus:
    """The judgement of a policy on one checkpoint.

    Attributes:
        signed_by: Names in the policy of the witnesses that have cosigned; of logs, their origin.
        kinds_of_log: Kinds of the log's own signatures that hold.
    """

    checkpoint: SignedCheckpoint
    signed_by: tuple[str, ...]
    kinds_of_log: frozenset[SignatureKind]
    has_quorum: bool


class WitnessPolicy:
    """A parsed policy file."""

    def __init__(self, text: str, where: str = "policy") -> None:
        self.logs: list[PolicyParty] = []
        self.witnesses: list[PolicyParty] = []
        self._groups: dict[str, _Group] = {}
        self._quorum: str | None = None
        self._members: set[str] = set()
        for number, line in enumerate(text.split("\n"), 1):
            words = [word for word in _BLANKS.split(line) if word]
            if not words or words[0].startswith("#"):
                continue
            try:
                self._read_line(words)
            except AuditLogError as exc:
                raise AuditLogError(f"{where}: line {number}: {exc}") from exc
        if self._quorum is None:
            raise AuditLogError(f"{where}: has no quorum line; write `quorum NAME`, or `quorum none`")

    @classmethod
    def from_file(cls, path: Path) -> "WitnessPolicy":
        """Read a policy file."""
        try:
            with path.open("rb") as file:
                data = file.read(MAX_POLICY_BYTES + 1)
            text = data.decode("utf-8", "surrogateescape")
        except OSError as exc:
            raise AuditLogError(f"{path}: cannot be read ({exc.strerror})") from exc
        if len(data) > MAX_POLICY_BYTES or any(
            (ord(sign) < 32 and sign not in "\t\n") or ord(sign) == 127 for sign in text
        ):
            raise AuditLogError(f"{path}: is too large or holds a control character")
        return cls(text, str(path))

    @property
    def keys(self) -> list[NoteKey]:
        """All keys that the policy trusts."""
        return [party.key for party in (*self.logs, *self.witnesses)]

    def judge_checkpoint(self, signed: SignedCheckpoint) -> QuorumStatus:
        """Check the signatures of a log and of its witnesses.

        Raises:
            AuditLogError: No log of the policy signed it under its own name.
        """
        times = signed.check_signatures(self.keys)
        origin = signed.checkpoint.origin
        kinds = frozenset(log.key.kind for log in self.logs if log.key in times and log.key.name == origin)
        if not kinds:
            raise AuditLogError(f"checkpoint of {origin[:80]!r}: no log of the policy signed it")
        signers = tuple(witness.name for witness in self.witnesses if witness.key in times)
        return QuorumStatus(signed, signers, kinds, self._holds(self._quorum or "", signers))

    def demand_quorum(self, signed: SignedCheckpoint, *, both_kinds: bool = False) -> QuorumStatus:
        """Judge a checkpoint and return only where enough witnesses have cosigned it.

        Args:
            both_kinds: The log must have signed by Ed25519 and by ML-DSA-44, and only ML-DSA-44 of witnesses counts.
        """
        status = self.judge_checkpoint(signed)
        if both_kinds:
            if status.kinds_of_log != {SignatureKind.LOG_ED25519, SignatureKind.COSIGNATURE_ML_DSA}:
                raise AuditLogError(
                    f"checkpoint of {signed.checkpoint.origin!r}: expected signatures of the log by Ed25519 and by "
                    "ML-DSA-44, both of keys of the policy"
                )
            kinds = {witness.name: witness.key.kind for witness in self.witnesses}
            safe = [name for name in status.signed_by if kinds[name] is SignatureKind.COSIGNATURE_ML_DSA]
            status = QuorumStatus(signed, tuple(safe), status.kinds_of_log, self._holds(self._quorum or "", safe))
        if not status.has_quorum:
            signers = ", ".join(status.signed_by) or "nobody"
            raise AuditLogError(
                f"checkpoint of {signed.checkpoint.origin!r} with {signed.checkpoint.head.size} entries: cosigned by "
                f"{signers}, which is not the quorum {self._quorum!r} of the policy"
            )
        return status

    def _read_line(self, words: list[str]) -> None:
        match words:
            case ["log", key, *url] if len(url) <= 1:
                self._add_party(self.logs, PolicyParty("", NoteKey.from_text(key), *url))
            case ["witness", name, key, *url] if len(url) <= 1:
                self._check_new(name)
                if NoteKey.from_text(key).kind is SignatureKind.LOG_ED25519:
                    raise AuditLogError(f"{name}: has a key of a log")
                self._add_party(self.witnesses, PolicyParty(name, NoteKey.from_text(key), *url))
            case ["group", name, threshold, *members] if members:
                self._check_new(name)
                self._groups[name] = _Group(self._read_threshold(threshold, members), tuple(members))
                self._members.update(members)
            case ["quorum", name] if self._quorum is None:
                if name != _NONE and name not in self._groups and name not in self._witness_names:
                    raise AuditLogError(f"quorum {name[:80]!r} is not defined above")
                self._quorum = name
            case _:
                raise AuditLogError(f"{words[0][:40]!r} is not understood here")

    def _read_threshold(self, text: str, members: list[str]) -> int:
        for member in members:
            if member not in self._groups and member not in self._witness_names:
                raise AuditLogError(f"{member[:80]!r} is not defined above")
            if member in self._members or members.count(member) > 1:
                raise AuditLogError(f"{member[:80]!r} is a member twice")
        threshold = {"all": len(members), "any": 1}.get(text) or parse_decimal(text, "threshold")
        if not 1 <= threshold <= len(members):
            raise AuditLogError(f"threshold {threshold} of {len(members)} members")
        return threshold

    @property
    def _witness_names(self) -> set[str]:
        return {witness.name for witness in self.witnesses}

    def _check_new(self, name: str) -> None:
        if name == _NONE or name in self._groups or name in self._witness_names:
            raise AuditLogError(f"{name[:80]!r} is a name already")

    def _add_party(self, parties: list[PolicyParty], party: PolicyParty) -> None:
        if any(party.key.public_key == other.key.public_key for other in parties):
            raise AuditLogError(f"the key of {party.key.name!r} is there twice")
        parties.append(party)

    def _holds(self, name: str, signers: Collection[str]) -> bool:
        group = self._groups.get(name)
        if group is None:
            return name == _NONE or name in signers
        return sum(self._holds(member, signers) for member in group.members) >= group.threshold
