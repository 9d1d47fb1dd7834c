"""Shamir's secret sharing of 256-bit secrets over a prime field.

A secret is the value at 0 of a random polynomial; a share is the value at the number of its holder.

Source: Shamir 1979.
"""

from collections.abc import Callable, Mapping, Sequence

FIELD = 2**256 + 297
"""The smallest prime above 2^256: each 32 bytes are an element of the field."""
SECRET_BYTES, SHARE_BYTES = 32, 33
_DRAW_BYTES = 48


def split_secret(
    secret: bytes, holders: Sequence[int], threshold: int, fresh: Callable[[int], bytes]
) -> dict[int, bytes]:
    """Return one share of 33 bytes for each holder; `threshold` of them give the secret back, fewer tell nothing.

    Args:
        secret: 32 bytes.
        holders: Their numbers, from 1, each once.
        threshold: 1 to the number of holders.
        fresh: ``fresh(n)`` returns n random bytes.
    """
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= len(holders):
        raise ValueError(f"shares: a secret of {len(secret)} bytes, {threshold} of {len(holders)} shares")
    if len(set(holders)) != len(holders) or not all(0 < holder < FIELD for holder in holders):
        raise ValueError("shares: holders are numbered from 1, each once")
    # 384 bits modulo a prime of 257: the distance from uniform is below 2^-127
    drawn = [int.from_bytes(fresh(_DRAW_BYTES), "big") % FIELD for _ in range(threshold - 1)]
    coefficients = [int.from_bytes(secret, "big"), *drawn]
    return {holder: _value_at(coefficients, holder).to_bytes(SHARE_BYTES, "big") for holder in holders}


def combine_shares(shares: Mapping[int, bytes]) -> bytes | None:
    """Return the secret that these shares lie on, or None where their polynomial's value at 0 has more than 32 bytes.

    Args:
        shares: At least the threshold, by number of the holder. Shares of different secrets give a random result: the
            caller compares it with a digest or a public key.
    """
    secret = sum(
        weight * int.from_bytes(share, "big")
        for weight, share in zip(_weights_at_zero(tuple(shares)), shares.values(), strict=True)
    )
    secret %= FIELD
    return secret.to_bytes(SECRET_BYTES, "big") if secret < 2 ** (8 * SECRET_BYTES) else None


def _value_at(coefficients: Sequence[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % FIELD
    return value


def _weights_at_zero(holders: tuple[int, ...]) -> list[int]:
    """Return Lagrange's weights: the product over all others of x' / (x' - x)."""
    weights = []
    for x in holders:
        above = below = 1
        for other in holders:
            if other != x:
                above, below = above * other % FIELD, below * (other - x) % FIELD
        weights.append(above * pow(below, -1, FIELD) % FIELD)
    return weights
