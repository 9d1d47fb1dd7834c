"""Approvals of a release: signatures over run, weights and policy, each by a key of a person whom the policy names."""

import re
from dataclasses import dataclass
from pathlib import Path

from phalanx.config import canonical_json
from phalanx.data.shards import fingerprint_of
from phalanx.errors import PolicyError
from phalanx.policy.policy_file import TrainingPolicy, open_signature, write_signature
from phalanx.security.crypto import Identity, in_domain

APPROVALS = "approvals"
"""Their folder in a run directory."""
_DOMAIN = "release-approval/1"
_WEIGHTS = re.compile(r"[0-9a-f]{64}")


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


def approve_release(run_dir: Path, policy: TrainingPolicy, approval: Approval, signer: Identity) -> str:
    """Sign an approval into a run directory.

    Returns:
        The name of the person whose key this is.

    Raises:
        PolicyError: The policy names nobody with this key, or the run has not ended.
    """
    key = fingerprint_of(signer)
    person = next((name for name, keys in policy.release.releasers.items() if key in keys), None)
    if person is None:
        raise PolicyError(f"policy {policy.name}: release.releasers has nobody with the key {key}")
    if _WEIGHTS.fullmatch(approval.weights) is None:
        raise PolicyError(f"{run_dir}: the log has no digest of final weights: the run has not ended")
    write_signature(_file_of(run_dir, person), signer, approval.signed_bytes(policy, person))
    return person


def count_approvals(run_dir: Path, policy: TrainingPolicy, approval: Approval) -> list[str]:
    """Return the people whose approvals hold: one for each person, whatever files are there.

    An approval of earlier weights, of another policy or by another key counts for nothing.
    """
    people = []
    for person, keys in sorted(policy.release.releasers.items()):
        path = _file_of(run_dir, person)
        try:
            content = path.read_bytes()
        except OSError:
            continue
        if any(_is_signed(content, path, key, approval.signed_bytes(policy, person)) for key in keys):
            people.append(person)
    return people


def _is_signed(content: bytes, path: Path, key: str, statement: bytes) -> bool:
    try:
        open_signature(content, path, key, statement)
    except PolicyError:
        return False
    return True


def _file_of(run_dir: Path, person: str) -> Path:
    return run_dir / APPROVALS / f"{person}.json"
