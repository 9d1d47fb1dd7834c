import math

import pytest
from pydantic import ValidationError

from phalanx.config import digest_config
from phalanx.errors import ReleaseRefusedError
from phalanx.security.seal import PermittedRelease, ReleaseGate, ReleasePolicy, ReleaseRefusal, ReleaseRequest

POLICY = ReleasePolicy(min_clients=3, clip_norm=2.0)


def gate(policy=POLICY, clients=("a", "b", "c")):
    made = ReleaseGate(policy)
    for client in clients:
        made.note_contribution(client, 8)
    return made


def refused(made, update):
    with pytest.raises(ReleaseRefusedError) as caught:
        made.permit_release(update)
    return caught.value.reason


def test_an_update_of_enough_clients_within_its_bound_leaves():
    assert gate().permit_release(ReleaseRequest(norm=2.0)) == PermittedRelease(1, 3, 2.0, 0.0, digest_config(POLICY))


@pytest.mark.parametrize("clients", [(), ("a",), ("a", "b"), ("a", "b", "b", "a")])
def test_an_update_of_too_few_clients_stays(clients):
    assert refused(gate(clients=clients), ReleaseRequest(norm=1.0)) == ReleaseRefusal.TOO_FEW_CLIENTS


def test_a_client_with_too_few_examples_does_not_count():
    made = gate(ReleasePolicy(min_clients=3, min_examples=10, clip_norm=2.0))

    assert refused(made, ReleaseRequest(1.0)) == ReleaseRefusal.TOO_FEW_CLIENTS
    for client in "abc":
        made.note_contribution(client, 2)
    assert made.permit_release(ReleaseRequest(1.0)).num_clients == 3


def test_what_one_client_added_after_a_release_does_not_leave_alone():
    made = gate()
    made.permit_release(ReleaseRequest(1.0))
    made.note_contribution("a", 100)

    assert refused(made, ReleaseRequest(1.0)) == ReleaseRefusal.TOO_FEW_CLIENTS

    made.note_contribution("b", 1)
    made.note_contribution("d", 1)
    assert made.permit_release(ReleaseRequest(1.0)).number == 2


@pytest.mark.parametrize("norm", [math.nextafter(2.0, 3.0), 1e300])
def test_an_update_beyond_its_bound_stays(norm):
    assert refused(gate(), ReleaseRequest(norm)) == ReleaseRefusal.NOT_CLIPPED


@pytest.mark.parametrize(
    "update",
    [
        ReleaseRequest(math.nan),
        ReleaseRequest(math.inf),
        ReleaseRequest(-1.0),
        ReleaseRequest(1.0, math.nan),
        ReleaseRequest(1.0, -1.0),
    ],
)
def test_a_norm_or_noise_that_is_no_number_stays(update):
    assert refused(gate(), update) == ReleaseRefusal.NOT_FINITE


def test_an_update_without_the_promised_noise_stays():
    made = gate(ReleasePolicy(min_clients=3, clip_norm=2.0, noise_multiplier=0.5))

    assert refused(made, ReleaseRequest(1.0)) == ReleaseRefusal.NOT_NOISED
    assert refused(made, ReleaseRequest(1.0, math.nextafter(1.0, 0.0))) == ReleaseRefusal.NOT_NOISED
    assert made.permit_release(ReleaseRequest(1.0, 1.0)).noise_std == 1.0


def test_after_the_last_release_nothing_leaves():
    made = gate(ReleasePolicy(min_clients=2, clip_norm=2.0, max_releases=1))
    made.permit_release(ReleaseRequest(1.0))
    for client in "abc":
        made.note_contribution(client, 8)

    assert refused(made, ReleaseRequest(1.0)) == ReleaseRefusal.TOO_MANY


def test_a_refusal_changes_nothing():
    made = gate()
    before = made.release_counts()

    refused(made, ReleaseRequest(3.0))

    assert made.release_counts() == before
    assert made.permit_release(ReleaseRequest(1.0)).number == 1


def test_the_books_go_on_after_a_restart():
    made = gate(clients=("a", "b"))

    again = ReleaseGate(POLICY, made.release_counts())

    assert refused(again, ReleaseRequest(1.0)) == ReleaseRefusal.TOO_FEW_CLIENTS
    again.note_contribution("c", 1)
    assert again.permit_release(ReleaseRequest(1.0)).number == 1


def test_books_that_were_kept_under_another_policy_are_refused():
    with pytest.raises(ReleaseRefusedError, match="another policy"):
        ReleaseGate(ReleasePolicy(min_clients=2, clip_norm=2.0), gate().release_counts())


RELEASED = {"number": 1, "num_clients": 3, "clip_norm": 2.0, "noise_std": 0.0, "policy_digest": "ab"}


@pytest.mark.parametrize(
    "changes",
    [
        {"examples": []},
        {"examples": {"A": 1}},
        {"examples": {"a": 0}},
        {"examples": {"a": True}},
        {"examples": {"a": "1"}},
        {"latest": {"number": -1}},
        {"latest": {**RELEASED, "number": -1}},
        {"latest": {**RELEASED, "number": True}},
        {"latest": {**RELEASED, "more": 1}},
        {"more": 1},
    ],
)
def test_damaged_books_are_refused(changes):
    with pytest.raises(ReleaseRefusedError, match="malformed"):
        ReleaseGate(POLICY, gate().release_counts() | changes)


@pytest.mark.parametrize(("client", "examples"), [("", 1), ("A b", 1), (5, 1), ("a", 0), ("a", -1), ("a", 1.0)])
def test_an_odd_contribution_is_refused(client, examples):
    with pytest.raises(ReleaseRefusedError, match="malformed"):
        ReleaseGate(POLICY).note_contribution(client, examples)


@pytest.mark.parametrize(
    "changes",
    [
        {"min_clients": 1},
        {"min_clients": 0},
        {"min_clients": "3"},
        {"min_clients": True},
        {"min_examples": 0},
        {"clip_norm": 0.0},
        {"clip_norm": -1.0},
        {"clip_norm": math.inf},
        {"clip_norm": math.nan},
        {"clip_norm": None},
        {"noise_multiplier": 0.0},
        {"noise_multiplier": math.nan},
        {"max_releases": 0},
        {"unknown": 1},
    ],
)
def test_a_policy_that_protects_nobody_is_refused(changes):
    with pytest.raises(ValidationError):
        ReleasePolicy(**{"clip_norm": 1.0} | changes)


def test_a_policy_without_a_bound_is_none():
    with pytest.raises(ValidationError, match="clip_norm"):
        ReleasePolicy()
