"""Shamir's sharing: any threshold of shares gives the secret, fewer fit every secret; libraries of others agree."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.security.aggregate.shamir import FIELD, combine_shares, split_secret


@given(secret=st.binary(min_size=32, max_size=32), seed=st.integers(0, 2**32), threshold=st.integers(1, 6))
@settings(deadline=None)
def test_any_threshold_of_the_shares_gives_the_secret(secret, seed, threshold):
    shares = split_secret(secret, range(1, 8), threshold, random.Random(seed).randbytes)

    chosen = random.Random(seed).sample(sorted(shares), threshold)

    assert combine_shares({holder: shares[holder] for holder in chosen}) == secret


@pytest.mark.parametrize("secret", [b"\0" * 32, b"\xff" * 32, (2**255).to_bytes(32, "big")])
def test_secrets_at_the_borders_come_back(secret):
    shares = split_secret(secret, [1, 5, 1000], 3, random.Random(1).randbytes)

    assert combine_shares(shares) == secret
    assert {len(share) for share in shares.values()} == {33}


def test_one_share_less_fits_every_secret():
    shares = split_secret(b"\5" * 32, range(1, 6), 3, random.Random(2).randbytes)
    known = {1: shares[1], 2: shares[2]}

    # for each secret there is a third share that makes it: the two tell nothing
    for wanted in (0, 1, 2**200, 2**256 - 1):
        l1, l2, l3 = 3, -3, 1
        third = (wanted - l1 * int.from_bytes(known[1]) - l2 * int.from_bytes(known[2])) * pow(l3, -1, FIELD) % FIELD
        assert combine_shares({**known, 3: third.to_bytes(33, "big")}) == wanted.to_bytes(32, "big")


def test_shares_that_do_not_belong_together_give_another_secret_or_none():
    shares = split_secret(b"\5" * 32, range(1, 6), 3, random.Random(3).randbytes)

    assert combine_shares({**dict(itertools.islice(shares.items(), 2)), 3: b"\1" * 33}) != b"\5" * 32
    assert combine_shares({1: FIELD.to_bytes(33, "big")}) == bytes(32)
    assert combine_shares({1: (FIELD - 1).to_bytes(33, "big")}) is None


@pytest.mark.parametrize(
    ("secret", "holders", "threshold"),
    [(b"\0" * 31, [1, 2], 2), (b"\0" * 32, [1, 2], 3), (b"\0" * 32, [0, 1], 1), (b"\0" * 32, [1, 1], 1)],
)
def test_sharing_among_holders_that_cannot_be_is_refused(secret, holders, threshold):
    with pytest.raises(ValueError, match="shares"):
        split_secret(secret, holders, threshold, random.Random(4).randbytes)


def test_sympy_finds_the_field_prime_and_the_same_polynomial():
    sympy = pytest.importorskip("sympy")
    shares = split_secret(b"\7" * 32, [1, 2, 4, 9], 4, random.Random(5).randbytes)
    points = {holder: int.from_bytes(share) for holder, share in shares.items()}

    x = sympy.Symbol("x")
    whole = sympy.interpolate(list(points.items()), x)
    constant = sympy.Rational(whole.subs(x, 0))

    assert sympy.isprime(FIELD)
    assert sympy.prevprime(FIELD) < 2**256
    assert int(constant.p) * pow(int(constant.q), -1, FIELD) % FIELD == int.from_bytes(b"\7" * 32)


def test_mpyc_puts_our_shares_together_and_we_its_shares():
    thresha = pytest.importorskip("mpyc.thresha")
    from mpyc.finfields import GF

    field = GF(modulus=FIELD)
    secret = random.Random(6).randbytes(32)
    shares = split_secret(secret, range(1, 6), 3, random.Random(7).randbytes)
    theirs = thresha.random_split(field, [field(int.from_bytes(secret))], 2, 5)

    found = thresha.recombine(field, [(x, [int.from_bytes(shares[x])]) for x in (1, 3, 4)])
    ours = {x + 1: int(theirs[x][0]).to_bytes(33, "big") for x in (0, 2, 4)}

    assert int(found[0]) % FIELD == int.from_bytes(secret)
    assert combine_shares(ours) == secret
