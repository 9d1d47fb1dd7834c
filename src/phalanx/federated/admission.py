"""Admission: an update is refused for its own faults before any statistics look at it.

A site signs a header; the values follow as safetensors. A NaN breaks most rules, a second update of one site counts it
twice, and a replayed one is no training: none of that is a question of distances.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

import torch
from pydantic import Field, ValidationError
from safetensors.torch import load
from torch import Tensor

from phalanx.config import StrictModel, canonical_json
from phalanx.errors import SignatureError, UpdateRefusedError
from phalanx.security.crypto import Identity, Peer, digest_hex, in_domain
from phalanx.transport.tensors import UNREADABLE

_DOMAIN = "federated-update/1"
_MAX_HEADER_BYTES = 4096
_HEADER_OF_TENSORS = 2**20
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]


class UpdateRefusal(StrEnum):
    """Every reason of an `UpdateRefusedError`."""

    MALFORMED = "malformed"
    FOREIGN_SITE = "foreign_site"
    OTHER_BRINGER = "other_bringer"
    NOT_SIGNED = "not_signed"
    EXCLUDED = "excluded"
    OTHER_RUN = "other_run"
    OTHER_ROUND = "other_round"
    OTHER_MODEL = "other_model"
    SECOND_UPDATE = "second_update"
    REPLAYED = "replayed"
    OTHER_VALUES = "other_values"
    OTHER_SHAPE = "other_shape"
    OTHER_DTYPE = "other_dtype"
    NOT_FINITE = "not_finite"
    EMPTY = "empty"
    OVER_NORM = "over_norm"
    OVER_SAMPLES = "over_samples"


PROVEN = frozenset(UpdateRefusal) - {
    UpdateRefusal.MALFORMED,
    UpdateRefusal.FOREIGN_SITE,
    UpdateRefusal.OTHER_BRINGER,
    UpdateRefusal.NOT_SIGNED,
    UpdateRefusal.EXCLUDED,
    UpdateRefusal.REPLAYED,
    UpdateRefusal.EMPTY,
}
"""Refusals that show a lie of the site that brought the update: it has signed the header, and no honest site signs or
sends such an update. Equal or empty values show none, for training may end there."""


class UpdateHeader(StrictModel):
    """The signed part of a site's update.

    Attributes:
        model: Digest of the weights that the update is relative to.
        values: Digest of the bytes that follow.
        samples: Trained on; the weight of the update where a rule has weights.
    """

    version: Literal[1] = 1
    run: _Digest
    site: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}\z")]
    round: Annotated[int, Field(ge=1, lt=2**53)]
    model: _Digest
    values: _Digest
    samples: Annotated[int, Field(ge=1, lt=2**31)]


class _SignedHeader(StrictModel):
    body: UpdateHeader
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}\z")]


def sign_update(header: UpdateHeader, identity: Identity) -> bytes:
    """Return the bytes of a signed header."""
    return canonical_json(
        {"body": header.model_dump(mode="json"), "signature": identity.sign_data(_signed_bytes(header)).hex()}
    )


def _signed_bytes(header: UpdateHeader) -> bytes:
    return in_domain(_DOMAIN, canonical_json(header.model_dump(mode="json")))


@dataclass(frozen=True)
class DueUpdates:
    """The requirements of the updates of one round.

    Attributes:
        model: Digest of the weights that went out.
        shapes: Shape of each tensor, by name; all are of `dtype`.
        max_norm: Bound of the Euclidean norm of all values; sites scale theirs down to it themselves.
        max_samples: Bound of a site's weight.
    """

    run: str
    round: int
    model: str
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    max_norm: float
    max_samples: int

    @property
    def size_bytes(self) -> int:
        """Of the values of one update."""
        return self.dtype.itemsize * sum(math.prod(shape) for shape in self.shapes.values())


@dataclass(frozen=True)
class AdmittedUpdate:
    """An update that may be looked at.

    Attributes:
        header: The signed header, the evidence of the site's statement.
    """

    site: str
    samples: int
    tensors: dict[str, Tensor]
    norm: float
    header: bytes


class UpdateAdmission:
    """The door of the rounds of one run.

    Args:
        roster: The sites of the run by name, certified by its authority: one that makes up sites has no keys for them.

    Guarantees:
        What is admitted is signed by the site of the roster that brought it, for this run, round and model, is the
        site's only update of the round from these weights, is finite, has the names, shapes, dtype and norm that are
        due, and its values came in no earlier round, of any site. A refused update changes nothing: nothing that
        another party brings, and no copy of an update's values, has a site's own update refused.
        Does not find a copy of values of the same round: which of two sites copied cannot be shown.
    """

    def __init__(self, roster: Mapping[str, Peer]) -> None:
        self._roster = dict(roster)
        self._excluded: dict[str, str] = {}
        self._first_rounds: dict[str, int] = {}
        self._admitted: set[tuple[int, str, str]] = set()

    def exclude_site(self, site: str, reason: str) -> None:
        """Let a site in no more."""
        self._excluded.setdefault(site, reason)

    def recall_updates(self, headers: Iterable[bytes]) -> None:
        """Count updates of earlier sessions, by their signed headers, as updates that have come."""
        for header in headers:
            self._enter_update(self._read_header(header))

    def read_round(self, header: bytes) -> int:
        """Return the round that an update was trained in, by its signed header."""
        return self._read_header(header).round

    @property
    def excluded_sites(self) -> dict[str, str]:
        """The sites that are let in no more, with the reasons."""
        return dict(self._excluded)

    def admit_update(self, bringer: str, header: bytes, values: bytes, due: DueUpdates) -> AdmittedUpdate:
        """Check an update, and count it as its site's update of the round.

        Args:
            bringer: The site that handed it in, as its carrier proves.
            values: Safetensors bytes of the tensors.
        """
        body = self._read_header(header)
        if body.site != bringer:
            raise UpdateRefusedError(UpdateRefusal.OTHER_BRINGER, f"{bringer}: delivered an update of {body.site}")
        self._check_place(body, due)
        if len(values) > due.size_bytes + _HEADER_OF_TENSORS or digest_hex(values) != body.values:
            raise UpdateRefusedError(
                UpdateRefusal.OTHER_VALUES, f"{body.site}: sent values that differ from its signed digest"
            )
        if self._first_rounds.get(body.values, body.round) < body.round:
            raise UpdateRefusedError(
                UpdateRefusal.REPLAYED, f"{body.site}: the same values were sent in an earlier round"
            )
        tensors = _read_tensors(body.site, values, due)
        norm = _check_norm(body.site, tensors, due)
        self._enter_update(body)
        return AdmittedUpdate(body.site, body.samples, tensors, norm, header)

    def _enter_update(self, body: UpdateHeader) -> None:
        self._first_rounds[body.values] = min(body.round, self._first_rounds.get(body.values, body.round))
        self._admitted.add((body.round, body.model, body.site))

    def _read_header(self, header: bytes) -> UpdateHeader:
        try:
            message = _SignedHeader.model_validate_json(header[: _MAX_HEADER_BYTES + 1])
            is_canonical = canonical_json(message.model_dump(mode="json")) == header
        except ValidationError as exc:
            raise UpdateRefusedError(UpdateRefusal.MALFORMED, "header: not the header of an update") from exc
        if not is_canonical:
            raise UpdateRefusedError(UpdateRefusal.MALFORMED, "header: is not in canonical form")
        body = message.body
        peer = self._roster.get(body.site)
        if peer is None:
            raise UpdateRefusedError(UpdateRefusal.FOREIGN_SITE, f"{body.site}: not a site of this run")
        try:
            peer.verify_signature(bytes.fromhex(message.signature), _signed_bytes(body))
        except SignatureError as exc:
            raise UpdateRefusedError(UpdateRefusal.NOT_SIGNED, f"{body.site}: the signature does not match") from exc
        return body

    def _check_place(self, body: UpdateHeader, due: DueUpdates) -> None:
        if body.site in self._excluded:
            raise UpdateRefusedError(UpdateRefusal.EXCLUDED, f"{body.site}: {self._excluded[body.site]}")
        for field, reason in (
            ("run", UpdateRefusal.OTHER_RUN),
            ("round", UpdateRefusal.OTHER_ROUND),
            ("model", UpdateRefusal.OTHER_MODEL),
        ):
            if (value := getattr(body, field)) != (expected := getattr(due, field)):
                raise UpdateRefusedError(
                    reason, f"{body.site}: {field} is {str(value)[:16]}, expected {str(expected)[:16]}"
                )
        if (body.round, body.model, body.site) in self._admitted:
            raise UpdateRefusedError(
                UpdateRefusal.SECOND_UPDATE, f"{body.site}: already sent an update in round {body.round}"
            )
        if body.samples > due.max_samples:
            raise UpdateRefusedError(
                UpdateRefusal.OVER_SAMPLES, f"{body.site}: {body.samples} samples, at most {due.max_samples}"
            )


def _read_tensors(site: str, values: bytes, due: DueUpdates) -> dict[str, Tensor]:
    try:
        tensors = load(values)
    except UNREADABLE as exc:
        raise UpdateRefusedError(
            UpdateRefusal.OTHER_VALUES, f"{site}: its values are not in safetensors format"
        ) from exc
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != dict(due.shapes):
        odd = sorted(set(shapes.items()) ^ set(due.shapes.items()))[0]
        raise UpdateRefusedError(
            UpdateRefusal.OTHER_SHAPE, f"{site}: {odd[0][:80]} name or shape differs from the round's weights"
        )
    if any(tensor.dtype != due.dtype for tensor in tensors.values()):
        raise UpdateRefusedError(UpdateRefusal.OTHER_DTYPE, f"{site}: a tensor has not the type {due.dtype}")
    return tensors


def _check_norm(site: str, tensors: dict[str, Tensor], due: DueUpdates) -> float:
    if not all(torch.isfinite(tensor).all() for tensor in tensors.values()):
        raise UpdateRefusedError(UpdateRefusal.NOT_FINITE, f"{site}: a tensor holds NaN or infinity")
    squares = sum(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2 for tensor in tensors.values())
    norm = math.sqrt(squares)
    if norm == 0:
        raise UpdateRefusedError(UpdateRefusal.EMPTY, f"{site}: nothing was trained")
    # a site scales in its own precision
    if norm > due.max_norm * (1 + 1e-5):
        raise UpdateRefusedError(UpdateRefusal.OVER_NORM, f"{site}: norm {norm:.3g}, at most {due.max_norm:.3g}")
    return norm
