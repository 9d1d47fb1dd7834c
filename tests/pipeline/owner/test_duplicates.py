"""Duplicates for checkpoints: of one step, whole, as signed, while further steps run."""

import pytest

from phalanx.errors import VerificationError
from phalanx.models import LoraConfig
from phalanx.pipeline import GuardConfig
from phalanx.pipeline.protocol.messages import Bulk
from phalanx.testing import Actor, rewrite_only, tiny_run


def states(company):
    """Each stage's trained state as the engine collects it while nothing else runs."""
    return {
        copy.spec.index: {name: tensor.detach().clone() for name, tensor in copy.optimizer.state_tensors().items()}
        for copy in company.engine.fetch_stages("state")
    }


def whole(company, duplicate, most_steps=20):
    """Train on until the duplicate is whole, and hand it out."""
    for _ in range(most_steps):
        company.run(1)
        company.engine.update_duplicate()
        if duplicate.is_whole:
            break
    assert duplicate.is_whole
    return list(duplicate.take_stages())


def same(left, right):
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


@pytest.mark.quick_cases("off")
@pytest.mark.parametrize(
    "guard",
    [
        {},
        {"mode": "off"},
        pytest.param({"shadow": "lockstep"}, marks=pytest.mark.slow),
        {"keep_states": 2},
    ],
    ids=lambda guard: "-".join(str(value) for value in guard.values()) or "gradient",
)
def test_a_duplicate_has_the_bits_of_its_own_step_although_the_run_went_on(make_company, guard):
    run = tiny_run(guard=GuardConfig(step_audit_rate=0.0, owner_audit_rate=0.0, **guard))
    company = make_company(run)
    company.run(3)
    expected = states(company)

    parts = whole(company, company.engine.begin_duplicate())

    guarded = guard.get("mode") != "off"
    assert [part.stage for part in parts] == [0, 1, 2, 3]
    assert all(part.num_steps == 3 for part in parts)
    assert all(same(part.tensors, expected[part.stage]) for part in parts)
    assert [part.agreed is not None for part in parts] == [False, guarded, guarded, False]
    for part in parts:
        part.check_digest()


@pytest.mark.slow
def test_a_run_with_duplicates_ends_with_the_bits_of_one_without(make_company, honest_digest):
    company = make_company()
    for _ in range(3):
        whole(company, company.engine.begin_duplicate())
    num_steps = company.engine.next_step

    assert company.weights_digest() == honest_digest(company.run_config, num_steps)


@pytest.mark.slow
def test_frozen_weights_are_not_sent_again(make_company):
    company = make_company(tiny_run(adapter=LoraConfig(rank=2)))
    company.run(1)

    parts = whole(company, company.engine.begin_duplicate())

    names = {name for part in parts for name in part.tensors}
    assert names
    assert all(".lora_" in name for name in names)
    for part in parts:
        part.check_digest()


def lying_about_its_state(outgoing, message):
    if message.purpose != "duplicate":
        return (outgoing,)
    payload = bytearray(outgoing.payload)
    payload[5] ^= 1
    return (type(outgoing)(outgoing.receiver, message, bytes(payload)),)


def test_a_holder_that_sends_another_state_than_it_signed_is_refused_by_name(make_company):
    company = make_company(actors={2: Actor(rewrite=rewrite_only(Bulk, lying_about_its_state))})
    company.run(1)

    parts = whole(company, company.engine.begin_duplicate())

    for part in parts:
        if part.stage != 2:
            part.check_digest()
    with pytest.raises(VerificationError, match="stage 2: worker-2 sent a state that differs from its signature"):
        parts[2].check_digest()


def withholding(outgoing, message):
    return () if message.purpose == "duplicate" else (outgoing,)


def test_a_duplicate_that_is_withheld_is_given_up_and_the_run_goes_on(make_company, honest_digest):
    company = make_company(actors={1: Actor(rewrite=rewrite_only(Bulk, withholding))})
    company.run(1)
    duplicate = company.engine.begin_duplicate()
    company.engine._context.requests.timeout_s = 0.0

    company.run(2)
    company.engine.update_duplicate()

    assert duplicate.failure == "stage 1: worker-1 did not send its state in time"
    company.engine._context.requests.timeout_s = 30.0
    assert company.weights_digest() == honest_digest(company.run_config, 3)


def test_a_party_that_dies_takes_the_duplicate_with_it_and_nothing_else(make_company, honest_digest):
    company = make_company()
    company.run(2)
    duplicate = company.engine.begin_duplicate()
    company.kill_worker("worker-1")
    company.run(2)

    company.engine.finish_duplicate(duplicate)

    assert duplicate.failure is not None or duplicate.is_whole
    again = company.engine.begin_duplicate()
    company.engine.finish_duplicate(again)
    assert [part.stage for part in again.take_stages()] == [0, 1, 2, 3]
    assert company.weights_digest() == honest_digest(company.run_config, 4)


@pytest.mark.slow
def test_a_worker_that_leaves_between_two_steps_costs_a_duplicate_and_no_bit(make_company, honest_digest):
    company = make_company()
    company.run(1)
    held_up = company.engine.begin_duplicate()
    company.ask_to_leave("worker-1")
    for _ in range(20):
        company.run(1)
        if held_up.failure or held_up.is_whole:
            break

    again = company.engine.begin_duplicate()
    company.engine.finish_duplicate(again)

    assert [part.stage for part in again.take_stages()] == [0, 1, 2, 3]
    assert company.weights_digest() == honest_digest(company.run_config, company.engine.next_step)


@pytest.mark.slow
def test_a_second_duplicate_takes_the_place_of_the_first(make_company):
    company = make_company()
    company.run(1)
    first = company.engine.begin_duplicate()
    second = company.engine.begin_duplicate()

    company.engine.finish_duplicate(second)

    assert first.failure == "another one was started"
    assert second.is_whole


def test_each_stage_is_let_go_of_before_the_next_is_handed_out(make_company):
    import weakref

    company = make_company()
    company.run(1)
    duplicate = company.engine.begin_duplicate()
    company.engine.finish_duplicate(duplicate)
    alive = []

    for part in duplicate.take_stages():
        assert not any(tensor() is not None for tensor in alive)
        alive = [weakref.ref(tensor) for tensor in part.tensors.values()]
        assert alive
        del part
