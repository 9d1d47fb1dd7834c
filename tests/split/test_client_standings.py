"""Standings of clients by themselves: which are refused, which shut out, and what a sealed state keeps of it."""

import math

import pytest

from phalanx.config import canonical_json
from phalanx.errors import CheckpointError
from phalanx.security.crypto import parse_canonical
from phalanx.split.admission.config import ClientAdmissionConfig
from phalanx.split.admission.standings import ClientStandings, refusal_facts

CLIENTS = ("north", "south", "west")


def standings(**settings):
    return ClientStandings(CLIENTS, ClientAdmissionConfig(**settings))


def test_a_norm_at_its_bound_passes_and_one_above_it_does_not():
    found = standings(max_norm=2.0)

    assert found.judge_norms(0, {"north": 2.0, "south": math.nextafter(2.0, 3.0)}) == ["north"]

    (refusal,) = found.pop_refusals()
    assert (refusal.client, refusal.reason, refusal.bound, refusal.is_excluded) == ("south", "over_norm", 2.0, False)


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_what_is_not_finite_never_passes_and_is_told_without_a_figure(norm):
    found = standings()

    assert found.judge_norms(0, {"north": norm, "south": 1e30}) == ["south"]
    (refusal,) = found.pop_refusals()
    assert refusal.reason == "not_finite" and refusal_facts(refusal)["figure"] is None


def test_a_client_is_shut_out_when_it_was_refused_so_often_in_a_row_and_not_before():
    found = standings(max_norm=1.0, patience=3)
    for step, norm in enumerate((2.0, 2.0, 0.5, 2.0, 2.0)):
        found.judge_norms(step, {"north": norm})
    assert found.is_counted("north")

    found.judge_norms(5, {"north": 2.0})

    assert not found.is_counted("north") and dict(found.excluded_clients) == {"north": "over_norm"}
    assert [one.is_excluded for one in found.pop_refusals()] == [False] * 4 + [True]


def test_far_clients_are_shut_out_up_to_as_many_as_may_lie():
    found = standings(rule="median", byzantine=1, far=2.0, patience=1)

    found.judge_distances(0, {"north": 1.0, "south": 1.0, "west": 2.0})
    assert not found.excluded_clients

    found.judge_distances(1, {"north": 1.0, "south": 9.0, "west": 1.0})
    found.judge_distances(2, {"north": 1.0, "south": 1.0, "west": 8.0})
    assert dict(found.excluded_clients) == {"south": "far"}


def test_two_clients_are_never_compared():
    found = standings(held_out_factor=1.5, patience=1)

    for name, loss in (("north", 1.0), ("south", 90.0)):
        found.note_measurement(name, loss, 1)
    found.judge_measurements(1)

    assert found.is_counted("south")


def test_a_client_with_a_larger_held_out_loss_does_not_count_until_a_measurement_clears_it():
    found = standings(held_out_factor=1.5, patience=2)

    def measure(step, **losses):
        for name, loss in losses.items():
            found.note_measurement(name, loss / 2, 1)
            found.note_measurement(name, loss / 2, 1)
        found.judge_measurements(step)

    measure(1, north=1.0, south=1.0, west=1.5)
    assert all(map(found.is_counted, CLIENTS))
    measure(2, north=1.0, south=1.0, west=1.6)
    assert not found.is_counted("west") and not found.excluded_clients
    found.judge_measurements(3)
    assert not found.is_counted("west") and not found.excluded_clients
    measure(4, north=1.0, south=1.0, west=1.0)
    assert found.is_counted("west")
    measure(5, north=1.0, south=1.0, west=math.nan)
    measure(6, north=1.0, south=1.0, west=7.0)
    assert dict(found.excluded_clients) == {"west": "held_out_loss"}


@pytest.mark.parametrize("texts", [None, (0.0, 0)])
def test_a_client_that_has_nothing_measured_is_cleared_by_no_measurement(texts):
    judged = standings(held_out_factor=1.5)
    for client, loss in (("north", 1.0), ("south", 1.0), ("west", 9.0)):
        judged.note_measurement(client, loss, 1)
    judged.judge_measurements(4)

    for client in ("north", "south"):
        judged.note_measurement(client, 1.0, 1)
    if texts is not None:
        judged.note_measurement("west", *texts)
    judged.judge_measurements(8)

    assert [client for client in CLIENTS if judged.is_counted(client)] == ["north", "south"]


def test_a_measurement_counts_without_clients_that_are_shut_out_or_whose_loss_would_be_refused():
    found = standings(held_out_factor=1.5, max_norm=1.0, patience=1)
    found.note_measurement("north", 2.0, 2)
    found.note_measurement("south", 1.0, 1)
    found.note_measurement("west", 3.2, 2)
    assert [found.is_measured(name) for name in CLIENTS] == [True, True, False]
    found.judge_measurements(1)
    assert dict(found.excluded_clients) == {"west": "held_out_loss"}

    # what it says of its texts later does not bring it back
    for name in CLIENTS:
        found.note_measurement(name, 1.0, 1)
    assert [found.is_measured(name) for name in CLIENTS] == [True, True, False]
    # nor is there a middle one of two clients
    found.judge_measurements(2)
    found.note_measurement("north", 1.0, 1)
    found.note_measurement("south", 9.0, 1)
    assert [found.is_measured(name) for name in CLIENTS] == [True, True, False]


def test_one_text_without_a_loss_takes_all_texts_of_its_client_out_of_a_measurement():
    found = standings()
    for name in CLIENTS:
        found.note_measurement(name, 1.0, 1)
    found.note_measurement("west", math.nan, 1)

    assert [found.is_measured(name) for name in CLIENTS] == [True, True, False]


def test_standings_go_through_a_sealed_state_as_they_are():
    found, other = standings(max_norm=1.0, patience=2), standings(max_norm=1.0, patience=2)
    found.judge_norms(0, {"north": 2.0, "south": 2.0})
    found.judge_norms(1, {"south": 2.0})
    found.note_measurement("west", math.inf, 3)

    other.restore_standings(parse_canonical(canonical_json(found.dump_standings())))
    other.judge_norms(2, {"north": 2.0})

    assert dict(other.excluded_clients) == {"south": "over_norm", "north": "over_norm"}
    assert other.dump_standings()["measured"] == {"west": [1e300, 3]}


@pytest.mark.parametrize(
    "books",
    [{"excluded": {"mallory": "far"}}, {"excluded": {"north": "dislike"}}, {"num_events": 3, "digest": "x"}, None],
)
def test_books_of_another_run_are_refused(books):
    with pytest.raises(CheckpointError, match="sealed state"):
        standings().restore_standings(books)


@pytest.mark.parametrize("given", [{"rule": "median"}, {"byzantine": 1}])
def test_a_rule_and_how_many_lie_come_together(given):
    with pytest.raises(ValueError, match="a mean tolerates no lying client"):
        ClientAdmissionConfig(**given)
