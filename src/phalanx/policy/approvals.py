"""Approvals: signatures over an act or a release, each by a key of a person in a policy or a file of roles."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.config import canonical_json
from phalanx.errors import PolicyError
from phalanx.policy.policy_file import TrainingPolicy
from phalanx.policy.signers import open_signature, write_signature
from phalanx.security.audit import PersonSigner
from phalanx.security.crypto import in_domain

APPROVALS = "approvals"
"""Their folder in a run directory, and beside a file of roles."""
_DOMAIN, _ACT_DOMAIN = "release-approval/1", "act-approval/1"
_WEIGHTS = re.compile(r"[0-9a-f]{64}")

People = Mapping[str, Sequence[str]]
"""Fingerprints of the keys of each person, by name; a key belongs to one person."""


@dataclass(frozen=True)
class Approval:
    """What is approved.

    Attributes:
        run: Id of the run, from its signed log.
        weights: Digest of its final weights, from the same log.
    """

    run: str
    weights: str

    def signed_bytes(self, policy: TrainingPolicy, person: str) -> bytes:
        """Return the statement of one person: of another run, weights, policy or person it has other bytes."""
        return in_domain(_DOMAIN, canonical_json([self.run, self.weights, policy.digest, person]))


@dataclass(frozen=True)
class ActApproval:
    """An act that needs a second person.

    Attributes:
        action: A name of `FOUR_EYES`.
        target: What it is done to, so that an approval is good for this alone.
        roles: Digest of the roles in force; after a change of roles nothing is approved.
    """

    action: str
    target: str
    roles: str

    def signed_bytes(self, person: str) -> bytes:
        """Return the statement of one person."""
        return in_domain(_ACT_DOMAIN, canonical_json([self.action, self.target, self.roles, person]))

    def sign_approval(self, home: Path, person: str, signer: PersonSigner) -> None:
        """Write the approval of one person beside the file of roles."""
        write_signature(self._file_of(home, person), signer, self.signed_bytes(person))

    def list_approvers(self, home: Path, people: People) -> list[str]:
        """Return the people whose approvals hold."""
        return _list_approvers(people, lambda person: self._file_of(home, person), self.signed_bytes)

    def _file_of(self, home: Path, person: str) -> Path:
        name = hashlib.sha256(self.target.encode()).hexdigest()[:16]
        return home / APPROVALS / f"{self.action}-{name}-{person}.json"


def person_of_key(people: People, key: str) -> str | None:
    """Return the person who has a key."""
    return next((name for name, keys in people.items() if key in keys), None)


def approve_release(
    run_dir: Path, policy: TrainingPolicy, approval: Approval, signer: PersonSigner, people: People | None = None
) -> str:
    """Sign an approval into a run directory.

    Args:
        people: Who may approve; None: the releasers of the policy.

    Returns:
        The name of the person whose key this is.

    Raises:
        PolicyError: Nobody who may release has this key, or the run has not ended.
    """
    key = signer.fingerprint
    person = person_of_key(policy.release.releasers if people is None else people, key)
    if person is None:
        raise PolicyError(f"policy {policy.name}: release.releasers has nobody with the key {key}")
    if _WEIGHTS.fullmatch(approval.weights) is None:
        raise PolicyError(f"{run_dir}: the log has no digest of final weights: the run has not ended")
    write_signature(run_dir / APPROVALS / f"{person}.json", signer, approval.signed_bytes(policy, person))
    return person


def count_approvals(
    run_dir: Path, policy: TrainingPolicy, approval: Approval, people: People | None = None
) -> list[str]:
    """Return the people whose approvals hold: one for each person, whatever files are there.

    An approval of earlier weights, of another policy or by another key counts for nothing.
    """
    return _list_approvers(
        policy.release.releasers if people is None else people,
        lambda person: run_dir / APPROVALS / f"{person}.json",
        lambda person: approval.signed_bytes(policy, person),
    )


def _list_approvers(people: People, file_of: Callable[[str], Path], statement_of: Callable[[str], bytes]) -> list[str]:
    approvers = []
    for person, keys in sorted(people.items()):
        path = file_of(person)
        try:
            content = path.read_bytes()
        except OSError:
            continue
        if any(_is_signed(content, path, key, statement_of(person)) for key in keys):
            approvers.append(person)
    return approvers


def _is_signed(content: bytes, path: Path, key: str, statement: bytes) -> bool:
    try:
        open_signature(content, path, key, statement)
    except PolicyError:
        return False
    return True
