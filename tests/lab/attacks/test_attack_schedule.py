import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.lab.attacks import attack_files_in
from phalanx.pipeline import AttackConfig


def steps_of(config, party="worker-1", num_steps=1000):
    return {step for step in range(num_steps) if attack_files_in(config, party, step)}


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.7])
def test_a_rate_is_the_share_of_steps(rate):
    found = len(steps_of(AttackConfig(rate=rate))) / 1000

    # four standard deviations
    assert abs(found - rate) < 4 * (rate * (1 - rate) / 1000) ** 0.5


def test_rate_one_is_every_step_and_rate_zero_none():
    assert len(steps_of(AttackConfig(rate=1.0))) == 1000
    assert steps_of(AttackConfig(rate=0.0)) == set()


@given(st.integers(0, 50), st.none() | st.integers(0, 60), st.floats(0, 1))
def test_nothing_happens_outside_of_the_window(from_step, until_step, rate):
    config = AttackConfig(rate=rate, from_step=from_step, until_step=until_step)

    end = 60 if until_step is None else until_step
    assert steps_of(config, num_steps=60) <= set(range(from_step, end))


def test_the_window_begins_with_its_first_step_and_ends_before_its_last():
    assert steps_of(AttackConfig(from_step=3, until_step=5)) == {3, 4}


def test_the_window_does_not_move_the_coin():
    whole = steps_of(AttackConfig(rate=0.3))

    assert steps_of(AttackConfig(rate=0.3, from_step=500)) == {step for step in whole if step >= 500}


def test_seed_and_party_each_have_their_own_coin():
    base = steps_of(AttackConfig(rate=0.5))

    assert steps_of(AttackConfig(rate=0.5)) == base
    assert steps_of(AttackConfig(rate=0.5, seed=1)) != base
    assert steps_of(AttackConfig(rate=0.5), "worker-2") != base


def test_a_higher_rate_attacks_the_steps_of_a_lower_one_and_more():
    assert steps_of(AttackConfig(rate=0.3)) < steps_of(AttackConfig(rate=0.7))


def test_the_coin_is_the_same_on_every_machine():
    assert steps_of(AttackConfig(rate=0.3), num_steps=12) == {0, 1, 2, 7, 8}
