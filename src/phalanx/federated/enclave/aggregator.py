"""The program of the enclave: the one place where single updates are open, and which releases one aggregate."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from phalanx.aggregators import aggregate_updates
from phalanx.config import canonical_json
from phalanx.errors import AggregationError, CheckpointError, ConfigError, RollbackError, UpdateRefusedError
from phalanx.federated.admission import DueUpdates, UpdateAdmission
from phalanx.federated.enclave.channel import SEAL, binding_of, bound_terms
from phalanx.federated.mixing import min_mixed
from phalanx.federated.rounds.terms import RunTerms
from phalanx.federated.sealing import SealedPlace, unseal_bytes
from phalanx.federated.vectors import Shapes, flatten_tensors, seed_of
from phalanx.security.aggregate import MIN_CONTRIBUTORS, SumRefusal
from phalanx.security.crypto import HybridSealKey
from phalanx.security.seal import BlobPlace, BlobSealer, MonotonicCounter
from phalanx.security.tee import Attester

_HEADER_BYTES = 4
_MAX_HEADER = 4096
_STATE = "aggregator.sealed"


@dataclass(frozen=True)
class RoundOutcome:
    """The output of a round that leaves the enclave.

    Attributes:
        refused: Sites without one, with one word each.
        update: Aggregate by the rule, float32 ``[values]``.
    """

    members: tuple[str, ...]
    refused: dict[str, str]
    update: Tensor


class AggregatorPort(Protocol):
    """An aggregator, in this process or in a child's."""

    def get_evidence(self, nonce: bytes) -> tuple[bytes, bytes]:
        """Return its public key, and evidence that binds it to a site's nonce."""

    def aggregate_updates(self, number: int, model: str, sealed: Mapping[str, bytes]) -> RoundOutcome:
        """Open the updates of a round, and return one of them all."""


class AggregatorState:
    """The enclave's key and its book of rounds, sealed by the tier's key and numbered by its counters.

    Args:
        key: 32 bytes that this enclave alone is given.
        sealed: Numbers sealed states; used for nothing else.
        settled: Number of the newest state that is on the disk; used for nothing else.

    Raises:
        RollbackError: The file is older than the newest state that was settled, or another process has this state.

    Guarantees:
        A round's members are on the disk, and every older state is void, before its update leaves. With counters that
        the host can turn back, so can it turn back the book.
    """

    def __init__(
        self, directory: Path, key: bytes, run: str, sealed: MonotonicCounter, settled: MonotonicCounter
    ) -> None:
        self._path, self._run = directory / _STATE, run
        self._sealer, self._sealed, self._settled = BlobSealer(key, sealed), sealed, settled
        self._newest = sealed.read_count()
        self._members: dict[str, list[str]] = {}
        if self._settled.read_count() and not self._path.exists():
            raise RollbackError(f"{self._path}: is missing, but the counter proves that it existed; restore it")
        if self._path.exists():
            self._load_state()
        else:
            self.private = HybridSealKey.generate()
            self._write_state()

    def note_members(self, model: str, number: int, members: tuple[str, ...]) -> None:
        """Note a round's members before its update leaves."""
        update, sites = f"{number} {model}", sorted(members)
        if self._members.setdefault(update, sites) != sites:
            raise AggregationError(
                SumRefusal.REPEATED_ROUND,
                f"round {number}: was aggregated with other members; the difference would reveal single sites",
            )
        self._write_state()

    def _write_state(self) -> None:
        self._check_alone()
        body = {"private": self.private.secret_bytes.hex(), "members": self._members}
        blob = self._sealer.seal_blob(BlobPlace(self._run, "aggregator", 0), canonical_json(body))
        self._newest += 1
        self._check_alone()
        number, beside = self._newest, self._path.with_suffix(".tmp")
        try:
            with beside.open("wb") as file:
                file.write(blob)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self._path)
        except OSError as exc:
            raise RollbackError(f"{self._path}: cannot be written ({exc.strerror})") from exc
        while self._settled.read_count() < number:
            self._settled.increment()

    def _check_alone(self) -> None:
        if (count := self._sealed.read_count()) != self._newest:
            raise RollbackError(
                f"{self._path}: {count} states were sealed, {self._newest} of them known here: the aggregator runs "
                "twice, and both would release sums of one round; end both"
            )

    def _load_state(self) -> None:
        behind = self._newest - self._settled.read_count()
        blob = self._path.read_bytes()
        plain = self._sealer.open_blob(BlobPlace(self._run, "aggregator", 0), blob, unsafe_accept_behind=behind)
        try:
            body = json.loads(bytes(plain))
            self.private = HybridSealKey.from_bytes(bytes.fromhex(body["private"]))
            self._members = dict(body["members"])
        except (ValueError, KeyError, TypeError) as exc:
            raise CheckpointError(f"{self._path}: is not a state of this release") from exc


class EnclaveAggregator:
    """The aggregator of one run.

    Args:
        terms: Terms of the run: sites accept its evidence only where these equal their own.

    Guarantees:
        Of a round one update leaves, of `min_cohort` sites or more that have signed for it, by the rule that the terms
        name; of the updates of one round from one set of weights for one set of sites alone. Single updates leave
        never, and every number that leaves is a function of three or more sites' numbers.
    """

    def __init__(self, terms: RunTerms, shapes: Shapes, attester: Attester, state: AggregatorState) -> None:
        self._terms, self._shapes, self._attester, self._state = terms, dict(shapes), attester, state
        self._public = state.private.public_bytes
        self._bound = bound_terms(terms)

    def get_evidence(self, nonce: bytes) -> tuple[bytes, bytes]:
        """As `AggregatorPort` says."""
        try:
            binding = binding_of(self._terms, self._public, nonce)
        except ValueError as exc:
            raise AggregationError(SumRefusal.MALFORMED, f"aggregator: {exc}") from exc
        return self._public, self._attester.make_evidence(binding).to_bytes()

    def aggregate_updates(self, number: int, model: str, sealed: Mapping[str, bytes]) -> RoundOutcome:
        """As `AggregatorPort` says."""
        config, refused = self._terms.config, dict[str, str]()
        max_samples = config.max_samples if config.weights == "samples" else 1
        due = DueUpdates(self._terms.digest, number, model, self._shapes, torch.float32, config.max_norm, max_samples)
        # of this round alone: what was sent before is bound to another round or model by its header
        door, vectors, samples = UpdateAdmission(self._terms.roster), dict[str, Tensor](), dict[str, float]()
        for site in sorted(sealed):
            try:
                place = SealedPlace(SEAL, self._bound, number, model, site)
                admitted = door.admit_update(
                    site, *_part_update(unseal_bytes(place, self._state.private, sealed[site])), due
                )
            except (AggregationError, UpdateRefusedError) as exc:
                refused[site] = str(exc.reason)
                continue
            vectors[site], samples[site] = flatten_tensors(admitted.tensors), float(admitted.samples)
        least = max(config.min_cohort, MIN_CONTRIBUTORS)
        if len(vectors) < least:
            raise AggregationError(
                SumRefusal.TOO_FEW, f"aggregator: {len(vectors)} updates, expected {least} at least; {refused or ''}"
            )
        update = self._apply_rule(model, torch.stack(list(vectors.values())), torch.tensor(list(samples.values())))
        self._state.note_members(model, number, tuple(vectors))
        return RoundOutcome(tuple(vectors), refused, update)

    def _apply_rule(self, model: str, vectors: Tensor, samples: Tensor) -> Tensor:
        config = self._terms.config
        mixed = min_mixed(config.aggregator, config.byzantine, config.before, len(vectors))
        if mixed < MIN_CONTRIBUTORS:
            raise AggregationError(
                SumRefusal.SMALL_COHORT, f"aggregator: {config.aggregator} may return the numbers of {mixed} sites"
            )
        if config.aggregator == "mean":
            return samples / samples.sum() @ vectors
        try:
            return aggregate_updates(vectors, config.aggregator, config.byzantine, config.before, seed_of(model))
        except ConfigError as exc:
            raise AggregationError(SumRefusal.TOO_FEW, f"aggregator: {exc}") from exc


def join_update(header: bytes, values: bytes) -> bytes:
    """Return a signed header and its values in one piece."""
    return len(header).to_bytes(_HEADER_BYTES, "big") + header + values


def _part_update(data: bytes) -> tuple[bytes, bytes]:
    size = int.from_bytes(data[:_HEADER_BYTES], "big")
    if len(data) < _HEADER_BYTES + size or size > _MAX_HEADER:
        raise AggregationError(SumRefusal.MALFORMED, "update: its header exceeds its size")
    return data[_HEADER_BYTES : _HEADER_BYTES + size], data[_HEADER_BYTES + size :]
