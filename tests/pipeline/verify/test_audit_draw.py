import hashlib
import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from phalanx.pipeline import AuditDraw, fresh_nonce

rates = st.floats(0.001, 1.0)
microbatches = st.integers(1, 64)
NONCE = b"n" * 32
where = {"step": 3, "epoch": 0, "stage": 1}


@given(st.binary(min_size=1, max_size=40), rates, microbatches, st.integers(0, 10**6))
def test_exactly_ceil_q_m_different_microbatches_are_drawn_one_from_each_stratum(key, rate, count, step):
    drawn = AuditDraw(key, NONCE, rate).draw_microbatches(step=step, epoch=2, stage=1, num_microbatches=count)

    strata = math.ceil(rate * count)
    assert len(drawn) == strata
    assert len(set(drawn)) == strata
    for n, microbatch in enumerate(drawn):
        assert round(n * count / strata) <= microbatch < round((n + 1) * count / strata)


@given(microbatches)
def test_at_rate_one_everything_is_drawn(count):
    assert AuditDraw(b"key", NONCE, 1.0).draw_microbatches(**where, num_microbatches=count) == tuple(range(count))


def test_the_same_key_draws_the_same_and_every_argument_matters():
    draw = AuditDraw(b"k" * 32, NONCE, 0.01)

    def sequence(draw, **changed):
        return [draw.draw_microbatches(**(where | {"step": n} | changed), num_microbatches=64) for n in range(20)]

    first = sequence(draw)
    assert sequence(AuditDraw(b"k" * 32, NONCE, 0.01)) == first
    assert sequence(draw, epoch=1) != first
    assert sequence(draw, stage=2) != first
    assert sequence(AuditDraw(b"l" * 32, NONCE, 0.01)) != first
    assert sequence(AuditDraw(b"k" * 32, b"m" * 32, 0.01)) != first
    assert len(set(first)) > 10


def test_each_kind_of_draw_depends_on_the_nonce_of_the_session():
    rates = {"step_rate": 0.5, "owner_rate": 0.5}
    one, two = (AuditDraw(b"k" * 32, nonce, 0.5, **rates) for nonce in (NONCE, b"m" * 32))
    steps = range(100)

    for name in ("draws_whole_step", "draws_owner_audit"):
        coins = [[getattr(draw, name)(step=step, epoch=0, stage=1) for step in steps] for draw in (one, two)]
        assert coins[0] != coins[1]
    assert one.key_commitment == two.key_commitment


def test_no_two_nonces_are_alike():
    assert len({fresh_nonce() for _ in range(100)}) == 100
    assert {len(fresh_nonce()) for _ in range(100)} == {32}


def test_every_microbatch_is_drawn_about_as_often():
    draw = AuditDraw(b"a fixed key", NONCE, 0.125)

    counts = Counter(
        m for step in range(1600) for m in draw.draw_microbatches(step=step, epoch=0, stage=1, num_microbatches=8)
    )

    # 200 expected each, standard deviation 13
    assert set(counts) == set(range(8))
    assert all(abs(count - 200) < 5 * 13.3 for count in counts.values())


def test_the_commitment_is_the_digest_of_the_key_and_hides_it():
    draw = AuditDraw(b"secret", NONCE, 0.5)

    assert draw.key_commitment == hashlib.sha256(b"secret").hexdigest()
    assert draw.key_commitment != AuditDraw(b"secrey", NONCE, 0.5).key_commitment
    assert b"secret".hex() not in draw.key_commitment
