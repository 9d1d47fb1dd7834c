"""Encrypting values, adding ciphertexts, opening a sum: integers of BFV, so a sum is exact.

Each ciphertext has 4095 values and a one in its last slot. The ones of a sum must be as many as its clients, in every
ciphertext of it: another key, an altered ciphertext, or too much noise give other numbers there.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from phalanx.config import StrictModel, canonical_json
from phalanx.errors import AggregationError
from phalanx.security.aggregate import MIN_CONTRIBUTORS, SumRefusal, Values
from phalanx.security.crypto import digest_hex, in_domain
from phalanx.security.homomorphic.key import MODULUS, RING, SumKey, context_of, load_tenseal

_SLOTS = RING - 1
_MAX_CLIENTS = 100
_MAX_HEADER, _MAX_BLOCK = 2**16, 2**18
_LENGTH_BYTES, _LONGEST_SIZE = 4, 8
_VECTOR_HEAD = b"\n\x02\x80\x20\x12"
"""Begins TenSEAL's message of one ciphertext with `RING` slots; its size in 3 bytes follows, and then it alone."""


@dataclass(frozen=True)
class HomomorphicTerms:
    """The terms of one sum; every ciphertext is bound to them. Ciphertexts are signed elsewhere.

    Attributes:
        minimum: Clients that a sum has at least.
        clip: Bound of the Euclidean norm of a client's values.
    """

    run: str
    round: int
    key: str
    clients: tuple[str, ...]
    minimum: int
    length: int
    clip: float

    def __post_init__(self) -> None:
        if list(self.clients) != sorted(set(self.clients)) or len(self.clients) > _MAX_CLIENTS:
            raise AggregationError(
                SumRefusal.FOREIGN_TERMS, f"clients: expected each name once, in order, at most {_MAX_CLIENTS}"
            )
        if not MIN_CONTRIBUTORS <= self.minimum <= len(self.clients):
            raise AggregationError(
                SumRefusal.SMALL_COHORT,
                f"minimum = {self.minimum} of {len(self.clients)} clients, expected {MIN_CONTRIBUTORS} at least",
            )
        if self.length < 1 or not 0 < self.clip < math.inf:
            raise AggregationError(SumRefusal.FOREIGN_TERMS, "length and clip: expected positive numbers")

    @property
    def max_level(self) -> int:
        """The largest integer that a value becomes: all clients' together stay within half of the modulus."""
        return (MODULUS // 2) // len(self.clients)

    @property
    def terms_digest(self) -> str:
        """BLAKE3 over all of them."""
        return digest_hex(
            in_domain("homomorphic-terms/1", canonical_json({**asdict(self), "clients": [*self.clients]}))
        )

    @property
    def num_blocks(self) -> int:
        """Ciphertexts of one client."""
        return -(-self.length // _SLOTS)


@dataclass(frozen=True)
class EncryptedSum:
    """The contents of an opened sum.

    Attributes:
        total: The exact sum of their integers, int64 ``[length]``.
        mean: The mean of their values, float32 ``[length]``.
    """

    clients: tuple[str, ...]
    total: NDArray[np.int64]
    mean: NDArray[np.float32]


def encrypt_values(public: bytes, terms: HomomorphicTerms, name: str, values: Values) -> bytes:
    """Return one client's values, clipped, rounded and encrypted.

    Args:
        values: ``[length]``, finite.
    """
    return encrypt_integers(public, terms, name, round_values(terms, values))


def round_values(terms: HomomorphicTerms, values: Values) -> NDArray[np.int64]:
    """Return a client's values, clipped, as integers within the terms' levels."""
    if values.shape != (terms.length,) or values.dtype not in (np.float32, np.float64) or not np.isfinite(values).all():
        raise AggregationError(
            SumRefusal.BAD_INPUT, f"values: {values.dtype}{list(values.shape)}, expected {terms.length} finite ones"
        )
    norm = float(np.linalg.norm(values.astype(np.float64)))
    scale = min(1.0, terms.clip / norm if norm else 1.0) * terms.max_level / terms.clip
    integers: NDArray[np.int64] = np.clip(
        np.rint(values.astype(np.float64) * scale), -terms.max_level, terms.max_level
    ).astype(np.int64)
    return integers


def encrypt_integers(public: bytes, terms: HomomorphicTerms, name: str, whole: NDArray[np.int64]) -> bytes:
    """Return a client's integers, encrypted.

    Args:
        whole: ``[length]``, modulo `MODULUS`.
    """
    context = _load_context(public, terms, secret=False)
    if name not in terms.clients:
        raise AggregationError(SumRefusal.FOREIGN_PARTY, f"{name}: is not in the terms")
    blocks = []
    for start in range(0, terms.length, _SLOTS):
        part = np.zeros(RING, np.int64)
        part[: len(whole[start : start + _SLOTS])] = whole[start : start + _SLOTS]
        part[_SLOTS] = 1
        blocks.append(load_tenseal().bfv_vector(context, part.tolist()).serialize())
    return _pack_blocks(terms, (name,), blocks)


def check_part(public: bytes, terms: HomomorphicTerms, name: str, part: bytes) -> None:
    """Raise unless a ciphertext belongs to this client and can be added; its plaintext stays unseen."""
    context = _load_context(public, terms, secret=False)
    names, blocks = _unpack_blocks(terms, part)
    if names != (name,):
        raise AggregationError(SumRefusal.FOREIGN_PARTY, f"{name}: sent a ciphertext of other clients")
    for block in blocks:
        _load_vector(context, block)


def sum_ciphertexts(public: bytes, terms: HomomorphicTerms, parts: Sequence[bytes]) -> bytes:
    """Return the encrypted sum of what clients sent; the server needs no secret.

    Args:
        parts: One ciphertext from `encrypt` per client.

    Raises:
        AggregationError: One is malformed, of other terms, or there twice; or they are too few.
    """
    context = _load_context(public, terms, secret=False)
    names: list[str] = []
    totals: list[Any] = []
    for part in parts:
        part_names, blocks = _unpack_blocks(terms, part)
        vectors = [_load_vector(context, block) for block in blocks]
        names += part_names
        totals = vectors if not totals else [vector.add_(other) for vector, other in zip(totals, vectors, strict=True)]
    _check_names(terms, names)
    return _pack_blocks(terms, tuple(sorted(names)), [vector.serialize() for vector in totals])


def decrypt_sum(key: SumKey, terms: HomomorphicTerms, total: bytes) -> EncryptedSum:
    """Open a sum.

    Args:
        key: Key with its secret half.
        total: Ciphertext from `sum_ciphertexts`.

    Raises:
        AggregationError: The sum is of too few clients, of another key or of other terms, or was altered.

    Guarantees:
        What is returned is a sum of so many ciphertexts as it names clients. That they are those clients' the server
        alone says: a server that puts one client's ciphertext three times into a sum is not found out here.
    """
    context = _load_context(key.secret, terms, secret=True, public=key.public)
    names, blocks = _unpack_blocks(terms, total)
    _check_names(terms, list(names))
    opened = np.array([_load_vector(context, block).decrypt() for block in blocks], np.int64)
    if opened.shape != (terms.num_blocks, RING) or (opened[:, _SLOTS] != len(names)).any():
        raise AggregationError(
            SumRefusal.BAD_INPUT,
            f"sum: does not open to {len(names)} clients' values; it is of another key, or altered",
        )
    integers = opened[:, :_SLOTS].reshape(-1)[: terms.length]
    step = terms.clip / terms.max_level
    return EncryptedSum(tuple(names), integers, (integers * (step / len(names))).astype(np.float32))


def _load_context(data: bytes, terms: HomomorphicTerms, *, secret: bool, public: bytes | None = None) -> Any:
    digest = digest_hex(data if public is None else public)
    if digest != terms.key:
        raise AggregationError(SumRefusal.FOREIGN_TERMS, f"key: is {digest[:16]}, the terms say {terms.key[:16]}")
    return context_of(data, secret=secret)


def _check_names(terms: HomomorphicTerms, names: Sequence[str]) -> None:
    if len(set(names)) != len(names) or not set(names) <= set(terms.clients):
        raise AggregationError(SumRefusal.FOREIGN_PARTY, "sum: a client is there twice, or is not in the terms")
    if len(names) < terms.minimum:
        raise AggregationError(SumRefusal.TOO_FEW, f"sum: {len(names)} clients, expected {terms.minimum} at least")


def _load_vector(context: Any, block: bytes) -> Any:
    """Read a ciphertext in its one form; TenSEAL adds others from memory that is not theirs, or not at all."""
    size = max(0, len(block) - len(_VECTOR_HEAD) - 3)
    head = _VECTOR_HEAD + bytes((size & 127 | 128, size >> 7 & 127 | 128, size >> 14))
    try:
        vector = load_tenseal().bfv_vector_from(context, block) if block.startswith(head) else None
        is_ours = vector is not None and not vector.ciphertext()[0].is_ntt_form()
    except (ValueError, RuntimeError, TypeError) as exc:
        raise AggregationError(SumRefusal.MALFORMED, "ciphertext: cannot be read with this key") from exc
    if not is_ours:
        raise AggregationError(SumRefusal.MALFORMED, f"ciphertext: is not one of {RING} slots in TenSEAL's form")
    return vector


def _pack_blocks(terms: HomomorphicTerms, names: Sequence[str], blocks: Sequence[bytes]) -> bytes:
    header = canonical_json(
        {"terms": terms.terms_digest, "clients": list(names), "sizes": [len(block) for block in blocks]}
    )
    return len(header).to_bytes(_LENGTH_BYTES, "big") + header + b"".join(blocks)


def _unpack_blocks(terms: HomomorphicTerms, data: bytes) -> tuple[tuple[str, ...], list[bytes]]:
    """Return names and ciphertexts; every size is checked before it is used."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "big")
    if length > _MAX_HEADER + _LONGEST_SIZE * terms.num_blocks:
        raise AggregationError(SumRefusal.MALFORMED, f"encrypted values: a header of {length} bytes")
    try:
        header = _Header.model_validate_json(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
    except ValidationError as exc:
        raise AggregationError(SumRefusal.MALFORMED, "encrypted values: the header is malformed") from exc
    sizes, body_start = header.sizes, _LENGTH_BYTES + length
    if len(sizes) != terms.num_blocks or len(data) != body_start + sum(sizes):
        raise AggregationError(
            SumRefusal.MALFORMED,
            f"encrypted values: {len(data)} bytes, expected {body_start + sum(sizes)} in {terms.num_blocks}",
        )
    if header.terms != terms.terms_digest:
        raise AggregationError(SumRefusal.FOREIGN_TERMS, "encrypted values: are of other terms")
    edges = np.cumsum([body_start, *sizes]).tolist()
    return header.clients, [data[start:stop] for start, stop in itertools.pairwise(edges)]


class _Header(StrictModel):
    terms: str
    clients: tuple[str, ...]
    sizes: tuple[Annotated[int, Field(ge=1, le=_MAX_BLOCK)], ...]
