"""Splits and clients: every text once, every class in its share, the same on every machine."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.tasks import Example, majority_share
from phalanx.data.tasks.split import balance_classes, dirichlet_clients, silo_clients, split_by_class, take_by_class
from phalanx.errors import DataError


def made(*sizes, silos=1):
    return [
        Example(f"text {label} {n}", label, f"silo {n % silos}")
        for label, size in enumerate(sizes)
        for n in range(size)
    ]


def counts(examples):
    return dict(sorted(Counter(example.label for example in examples).items()))


def test_a_split_keeps_the_share_of_every_class():
    train, test = split_by_class(made(50, 10, 2), 0.2, 0)

    assert counts(test) == {0: 10, 1: 2, 2: 1}
    assert counts(train) == {0: 40, 1: 8, 2: 1}
    assert not {one.text for one in train} & {one.text for one in test}


def test_a_split_depends_on_texts_and_seed_only():
    examples = made(20, 20)

    first = split_by_class(examples, 0.3, 1)

    assert first == split_by_class(examples[::-1], 0.3, 1)
    assert first != split_by_class(examples, 0.3, 2)
    # pinned, so that another Python or library cannot change it unseen
    assert [example.text for example in first[1][:3]] == PINNED


PINNED = ["text 0 16", "text 1 18", "text 1 0"]


def test_a_class_of_one_text_cannot_be_split():
    with pytest.raises(DataError, match="class 1: has 1 example"):
        split_by_class(made(5, 1), 0.5, 0)


@given(st.lists(st.integers(1, 40), min_size=2, max_size=6), st.integers(0, 120), st.integers(0, 5))
@settings(deadline=None)
def test_a_drawn_part_has_as_many_as_asked_for_and_every_class(sizes, count, seed):
    examples = made(*sizes)
    if count < len(sizes) and count < len(examples):
        with pytest.raises(DataError, match="at least one of each"):
            take_by_class(examples, count, seed)
        return

    drawn = take_by_class(examples, count, seed)

    assert len(drawn) == len(set(drawn)) == min(count, len(examples))
    assert len(counts(drawn)) == len(sizes)


def test_balanced_takes_no_more_of_a_class_than_asked_for():
    assert counts(balance_classes(made(30, 3, 10), 5, 0)) == {0: 5, 1: 3, 2: 5}


@given(st.integers(2, 6), st.floats(0.05, 50), st.integers(0, 20))
@settings(deadline=None)
def test_every_text_belongs_to_one_client(num_clients, alpha, seed):
    examples = made(60, 40, 30)

    clients = dirichlet_clients(examples, num_clients, alpha, seed)

    assert sorted(index for client in clients for index in client) == list(range(len(examples)))
    assert all(clients)
    assert clients == dirichlet_clients(examples, num_clients, alpha, seed)


def test_a_small_alpha_gives_clients_different_classes():
    examples = made(100, 100, 100, 100)

    def spread(alpha):
        shares = []
        for client in dirichlet_clients(examples, 4, alpha, 3):
            found = Counter(examples[index].label for index in client)
            shares.append(max(found.values()) / len(client))
        return min(shares), max(shares)

    assert spread(0.1)[1] > 0.7
    assert spread(1000.0)[1] < 0.35


def test_a_client_has_at_least_what_it_needs_or_nobody_trains():
    examples = made(30, 30)

    assert min(map(len, dirichlet_clients(examples, 4, 0.1, 0, at_least=8))) >= 8
    with pytest.raises(DataError, match="no draw in"):
        dirichlet_clients(examples, 4, 0.1, 0, at_least=16)


@pytest.mark.parametrize(("clients", "alpha"), [(1, 1.0), (2, 0.0), (2, float("nan")), (2, float("inf"))])
def test_numbers_that_make_no_clients_are_refused(clients, alpha):
    with pytest.raises(DataError, match="expected 2 or more"):
        dirichlet_clients(made(5, 5), clients, alpha, 0)


def test_a_silo_stays_with_one_client():
    examples = made(40, 20, silos=6)

    clients = silo_clients(examples, 4)

    assert sorted(index for client in clients for index in client) == list(range(60))
    owners = [{examples[index].silo for index in client} for client in clients]
    assert sum(map(len, owners)) == 6


def test_fewer_silos_than_clients_are_refused():
    with pytest.raises(DataError, match="3 silos for 4 clients"):
        silo_clients(made(10, 10, silos=3), 4)
    with pytest.raises(DataError, match="none unnamed"):
        silo_clients([Example("x", 0), Example("y", 1, "a"), Example("z", 1, "b")], 2)


def test_the_majority_is_that_of_the_training_texts():
    assert majority_share(made(3, 1), made(1, 3)) == 0.25
