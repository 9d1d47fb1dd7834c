"""The key of homomorphic sums: BFV of TenSEAL, which has no threshold decryption, so that keepers have keys each."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from phalanx.errors import AggregationError, ConfigError
from phalanx.security.aggregate import SumRefusal
from phalanx.security.crypto import digest_hex

RING = 4096
"""Degree of the polynomials, and values in one ciphertext."""
MODULUS = 1073692673
"""Largest prime below 2^30 that is 1 modulo twice the degree, so that each slot is a number modulo it."""
_COEFFICIENTS = [54, 54]
"""Bits of the ciphertext's modulus: 108 in all, of the 109 that give 128 bits of security at this degree."""
_MAX_BYTES = 2**22


@dataclass(frozen=True)
class SumKey:
    """A key pair of homomorphic sums.

    Attributes:
        public: Public key: clients encrypt with it, and a server adds with it.
        secret: Secret key: to be kept in an enclave, or by a keeper of one share alone.
    """

    public: bytes
    secret: bytes

    @cached_property
    def public_digest(self) -> str:
        """The digest of the public key, by which ciphertexts name it."""
        return digest_hex(self.public)


def new_key() -> SumKey:
    """Make a key pair, by TenSEAL's own generator."""
    seal = load_tenseal()
    context = seal.context(
        seal.SCHEME_TYPE.BFV, poly_modulus_degree=RING, plain_modulus=MODULUS, coeff_mod_bit_sizes=_COEFFICIENTS
    )
    leave_out = {"save_galois_keys": False, "save_relin_keys": False}
    return SumKey(
        context.serialize(save_secret_key=False, **leave_out), context.serialize(save_secret_key=True, **leave_out)
    )


def context_of(data: bytes, *, secret: bool) -> Any:
    """Return TenSEAL's context of a public or a secret key."""
    if len(data) > _MAX_BYTES:
        raise AggregationError(SumRefusal.MALFORMED, f"key: {len(data)} bytes, at most {_MAX_BYTES} are expected")
    try:
        context = load_tenseal().context_from(data)
        has_secret = context.has_secret_key()
        probe = load_tenseal().bfv_vector(context, [MODULUS - 1])
        is_ours = probe.size() == 1 and context.has_public_key()
    except (ValueError, RuntimeError, TypeError) as exc:
        raise AggregationError(SumRefusal.MALFORMED, "key: is not one of TenSEAL's for BFV") from exc
    if not is_ours or has_secret is not secret:
        kind = "secret" if secret else "public"
        raise AggregationError(SumRefusal.MALFORMED, f"key: is no {kind} one")
    return context


def load_tenseal() -> Any:
    """Return TenSEAL's module."""
    try:
        import tenseal as seal  # noqa: PLC0415 - an extra
    except ImportError as exc:
        raise ConfigError("homomorphic sums need tenseal, which is not installed; install phalanx-train[he]") from exc
    return seal
