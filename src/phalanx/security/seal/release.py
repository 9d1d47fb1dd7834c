"""The rule for adapters that leave the enclave: enough clients in them, a bounded norm, the promised noise.

The arithmetic on tensors is done elsewhere; here are the rule, and the counts of contributions that it needs.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from pydantic import Field

from phalanx.config import StrictModel, digest_config
from phalanx.errors import CertificateError, ReleaseRefusedError
from phalanx.security.crypto import check_party_name


class ReleaseRefusal(StrEnum):
    """Every reason of a `ReleaseRefusedError`."""

    TOO_FEW_CLIENTS = "too_few_clients"
    NOT_CLIPPED = "not_clipped"
    NOT_NOISED = "not_noised"
    NOT_FINITE = "not_finite"
    TOO_MANY = "too_many"
    MALFORMED = "malformed"


class ReleasePolicy(StrictModel):
    """The rule.

    Attributes:
        min_clients: So many different clients must have contributed since the last release. With two, each can subtract
            its own share and see the other's.
        min_examples: A client counts from so many examples since the last release.
        clip_norm: Bound of the Euclidean norm of what leaves, as its difference from what left before.
        noise_multiplier: Standard deviation of Gaussian noise over `clip_norm`; None is no noise, and then no
            differential privacy is promised.
        max_releases: After so many nothing leaves any more, as each one costs privacy; None is no limit.
    """

    min_clients: int = Field(default=3, ge=2)
    min_examples: int = Field(default=1, ge=1)
    clip_norm: float = Field(gt=0, allow_inf_nan=False)
    noise_multiplier: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_releases: int | None = Field(default=None, ge=1)


@dataclass(frozen=True)
class ReleaseRequest:
    """A request to let adapters leave.

    Attributes:
        norm: Euclidean norm of the difference from the last release, after clipping and before noise.
        noise_std: Standard deviation of the noise that was added to every element; 0 for none.
    """

    norm: float
    noise_std: float = 0.0


@dataclass(frozen=True)
class PermittedRelease:
    """A permitted release; goes into the audit log.

    Attributes:
        number: Number of the release, from 1.
        policy_digest: SHA-256 of the policy.
    """

    number: int
    num_clients: int
    clip_norm: float
    noise_std: float
    policy_digest: str


class ReleaseGate:
    """The gate that permits releases, and counts the clients that contributed since the last one.

    Only contributions since then count: two releases with one client's step between them would show that step.

    Args:
        state: Earlier `state`, out of a sealed blob; None at the beginning of a run.
    """

    def __init__(self, policy: ReleasePolicy, state: Mapping[str, Any] | None = None) -> None:
        self._policy = policy
        self._examples: dict[str, int] = {}
        self._latest: PermittedRelease | None = None
        if state is not None:
            self._restore_state(state)

    @property
    def repeatable_release(self) -> PermittedRelease | None:
        """The latest release where nobody has contributed since: its adapters may leave again, the same bits."""
        return None if self._examples else self._latest

    def note_contribution(self, client: str, num_examples: int) -> None:
        """Note that a verified step used examples of a client."""
        self._examples[_checked_name(client)] = self._examples.get(client, 0) + _check_positive(num_examples)

    def permit_release(self, update: ReleaseRequest) -> PermittedRelease:
        """Let one update out, and begin to count anew.

        Raises:
            ReleaseRefusedError: It stays sealed; `reason` tells why, and nothing has changed.
        """
        clients = self._check_clients()
        self._check_update(update)
        if self._policy.max_releases is not None and self._num_releases >= self._policy.max_releases:
            raise ReleaseRefusedError(
                ReleaseRefusal.TOO_MANY, f"release: {self._num_releases} of {self._policy.max_releases} were made"
            )
        self._latest = PermittedRelease(
            self._num_releases + 1, clients, self._policy.clip_norm, update.noise_std, digest_config(self._policy)
        )
        self._examples.clear()
        return self._latest

    def release_counts(self) -> dict[str, Any]:
        """Return the counts as JSON data, for a sealed blob: turned back, they would allow a release too many."""
        return {
            "examples": dict(self._examples),
            "latest": None if self._latest is None else asdict(self._latest),
            "policy": digest_config(self._policy),
        }

    @property
    def _num_releases(self) -> int:
        return 0 if self._latest is None else self._latest.number

    def _check_clients(self) -> int:
        enough = [name for name, num in self._examples.items() if num >= self._policy.min_examples]
        if len(enough) < self._policy.min_clients:
            raise ReleaseRefusedError(
                ReleaseRefusal.TOO_FEW_CLIENTS,
                f"release: {len(enough)} clients with {self._policy.min_examples} examples or more since the last one, "
                f"expected {self._policy.min_clients}; train with more of them first",
            )
        return len(enough)

    def _check_update(self, update: ReleaseRequest) -> None:
        if (
            not (math.isfinite(update.norm) and math.isfinite(update.noise_std))
            or min(update.norm, update.noise_std) < 0
        ):
            raise ReleaseRefusedError(ReleaseRefusal.NOT_FINITE, "release: norm or noise is negative or not finite")
        if not update.norm <= self._policy.clip_norm:
            raise ReleaseRefusedError(
                ReleaseRefusal.NOT_CLIPPED,
                f"release: norm {update.norm:.6g}, at most {self._policy.clip_norm:.6g}; clip first",
            )
        promised = (self._policy.noise_multiplier or 0.0) * self._policy.clip_norm
        if not update.noise_std >= promised:
            raise ReleaseRefusedError(
                ReleaseRefusal.NOT_NOISED, f"release: noise of {update.noise_std:.6g}, promised are {promised:.6g}"
            )

    def _restore_state(self, state: Mapping[str, Any]) -> None:
        if state.keys() != {"examples", "latest", "policy"} or not isinstance(state["examples"], dict):
            raise ReleaseRefusedError(ReleaseRefusal.MALFORMED, "release state: expected examples, latest and policy")
        if state["policy"] != digest_config(self._policy):
            raise ReleaseRefusedError(ReleaseRefusal.MALFORMED, "release state: was kept under another policy")
        self._examples = {_checked_name(name): _check_positive(num) for name, num in state["examples"].items()}
        self._latest = None if state["latest"] is None else _read_release(state["latest"])


def _read_release(value: Any) -> PermittedRelease:
    try:
        release = PermittedRelease(**value)
    except TypeError as exc:
        raise ReleaseRefusedError(ReleaseRefusal.MALFORMED, "release state: its latest release is malformed") from exc
    _check_positive(release.number)
    return release


def _checked_name(name: Any) -> str:
    try:
        return check_party_name(name)
    except (CertificateError, TypeError) as exc:
        raise ReleaseRefusedError(ReleaseRefusal.MALFORMED, "release: a client's name is no party name") from exc


def _check_positive(number: Any) -> int:
    if type(number) is not int or number < 1:
        raise ReleaseRefusedError(ReleaseRefusal.MALFORMED, f"release: {number!r:.40} examples, expected 1 or more")
    return number
