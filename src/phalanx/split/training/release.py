"""Adapters on their way out: the difference from what left before, clipped, with noise, if the policy lets it go."""

import math
import secrets
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from phalanx.errors import CheckpointError, ReleaseRefusedError
from phalanx.security.privacy import SEED_BYTES, SecureStream
from phalanx.security.seal import PermittedRelease, ReleaseGate, ReleasePolicy, ReleaseRefusal, ReleaseRequest

_BASE = "released/"
# so that rounding never carries a clipped norm over its bound
_SLACK = 1e-6


class ReleaseMaker:
    """The maker of releases, which records the released values.

    Args:
        policy: When values may be released; None: never.
        weights: Initial values of the trained tensors: they depend on the seed only, and are public.
    """

    def __init__(self, policy: ReleasePolicy | None, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._policy = policy
        self.gate = None if policy is None else ReleaseGate(policy)
        self._base = {name: tensor.detach().clone() for name, tensor in weights}

    def make_release(self, weights: Iterable[tuple[str, Tensor]]) -> tuple[PermittedRelease, dict[str, Tensor]]:
        """Return what may leave now: the latest release once more where nobody has contributed since."""
        if self._policy is None or self.gate is None:
            raise ReleaseRefusedError(
                ReleaseRefusal.TOO_FEW_CLIENTS, "release: the run has no [split.release], so adapters stay sealed"
            )
        if (latest := self.latest_release) is not None:
            return latest
        moved = {name: tensor.double() - self._base[name].double() for name, tensor in weights}
        moved_norm = total_norm(moved.values())
        scale = 1.0 if moved_norm <= self._policy.clip_norm else self._policy.clip_norm * (1 - _SLACK) / moved_norm
        moved = {name: tensor * scale for name, tensor in moved.items()}
        noise_std = (self._policy.noise_multiplier or 0.0) * self._policy.clip_norm
        release = self.gate.permit_release(ReleaseRequest(total_norm(moved.values()), noise_std))
        out = {
            name: (self._base[name].double() + tensor + noise_std * standard_normals(tensor.shape)).float()
            if noise_std
            else (self._base[name].double() + tensor).float()
            for name, tensor in moved.items()
        }
        self._base = {name: tensor.clone() for name, tensor in out.items()}
        return release, out

    @property
    def latest_release(self) -> tuple[PermittedRelease, dict[str, Tensor]] | None:
        """The latest release, which leaves with the same bits each time; None once somebody trains on."""
        latest = None if self.gate is None else self.gate.repeatable_release
        return None if latest is None else (latest, dict(self._base))

    def digested_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Return what the owner may have a digest of, by which guesses of one text can be tried.

        With noise that is what has left, and what the run began with as long as nothing has.
        """
        has_noise = self._policy is not None and self._policy.noise_multiplier is not None
        return self._base.items() if has_noise else weights

    def release_state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Return the released tensors and the metadata of the gate, for a sealed state."""
        if self.gate is None:
            return {}, {}
        return {f"{_BASE}{name}": tensor for name, tensor in self._base.items()}, self.gate.release_counts()

    def restore_release(self, tensors: dict[str, Tensor], books: Mapping[str, object]) -> dict[str, Tensor]:
        """Take over a state."""
        base = {name.removeprefix(_BASE): tensor for name, tensor in tensors.items() if name.startswith(_BASE)}
        if self._policy is not None:
            if base.keys() != self._base.keys():
                raise CheckpointError("sealed state: its released adapters belong to another model")
            self._base, self.gate = base, ReleaseGate(self._policy, books)
        return {name: tensor for name, tensor in tensors.items() if not name.startswith(_BASE)}


def total_norm(tensors: Iterable[Tensor]) -> float:
    """Euclidean norm over all tensors, in float64."""
    return math.sqrt(sum(float(torch.sum(tensor.double() ** 2)) for tensor in tensors))


def standard_normals(shape: torch.Size) -> Tensor:
    """Standard normal numbers, float64, from the operating system's generator: no seed brings them back."""
    drawn = SecureStream(secrets.token_bytes(SEED_BYTES)).next_normals(math.prod(shape))
    return torch.from_numpy(drawn).reshape(shape)
