"""Sealed boxes of shares against a server and dealers that lie, and what must hold before a client gives anything."""

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from summed_round import terms_of

from phalanx.errors import AggregationError
from phalanx.security.aggregate.boxes import SharePair, deal_shares, is_share_of, open_box, seal_box
from phalanx.security.aggregate.messages import Consent, SumRefusal
from phalanx.security.aggregate.shamir import SHARE_BYTES
from phalanx.security.aggregate.view import check_consents, check_included, check_view

TERMS = terms_of(9)
NAMES = TERMS.client_names
DEALER, HOLDER = NAMES[0], NAMES[1]
ADVERTS = "a" * 64
SHARES = SharePair("11" * SHARE_BYTES, "22" * SHARE_BYTES)


def refusal_of(act) -> SumRefusal:
    with pytest.raises(AggregationError) as caught:
        act()
    return caught.value.reason


@pytest.fixture(scope="module")
def keys():
    return X25519PrivateKey.generate(), X25519PrivateKey.generate()


def public(key: X25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


@pytest.fixture(scope="module")
def box(keys):
    return seal_box(TERMS, ADVERTS, (DEALER, HOLDER), (keys[0], public(keys[1])), SHARES)


def test_a_holder_opens_its_box_and_finds_the_shares_that_were_dealt(box, keys):
    assert open_box(TERMS, box, keys[1], public(keys[0])) == SHARES
    assert is_share_of(TERMS, box, "key", SHARES.key)
    assert is_share_of(TERMS, box, "seed", SHARES.seed)
    assert not is_share_of(TERMS, box, "key", SHARES.seed)
    assert not is_share_of(TERMS, box, "seed", SHARES.key)


def test_a_box_opens_for_nobody_else_and_under_no_other_terms_names_or_adverts(box, keys):
    other, first_byte = X25519PrivateKey.generate(), "01" if box.sealed.startswith("00") else "00"

    for opened in (
        lambda: open_box(TERMS, box, other, public(keys[0])),
        lambda: open_box(TERMS, box, keys[1], public(other)),
        lambda: open_box(terms_of(9, round=2), box, keys[1], public(keys[0])),
        lambda: open_box(TERMS, box.model_copy(update={"sender": NAMES[2]}), keys[1], public(keys[0])),
        lambda: open_box(TERMS, box.model_copy(update={"holder": NAMES[2]}), keys[1], public(keys[0])),
        lambda: open_box(TERMS, box.model_copy(update={"adverts": "b" * 64}), keys[1], public(keys[0])),
        lambda: open_box(
            TERMS, box.model_copy(update={"sealed": first_byte + box.sealed[2:]}), keys[1], public(keys[0])
        ),
    ):
        assert refusal_of(opened) == SumRefusal.BAD_SHARE


@pytest.mark.parametrize("name", ["key_share_digest", "seed_share_digest"])
def test_a_dealer_whose_box_holds_other_shares_than_it_signed_is_named(box, keys, name):
    lie = box.model_copy(update={name: "0" * 64})

    with pytest.raises(AggregationError, match="holds other shares") as caught:
        open_box(TERMS, lie, keys[1], public(keys[0]))
    assert caught.value.culprit == DEALER


def test_a_key_of_low_order_is_refused_and_its_owner_named(keys):
    with pytest.raises(AggregationError, match="low order") as caught:
        seal_box(TERMS, ADVERTS, (DEALER, HOLDER), (keys[0], "00" * 32), SHARES)
    assert (caught.value.reason, caught.value.culprit) == (SumRefusal.MALFORMED, HOLDER)


def test_each_holder_is_dealt_a_share_of_both_secrets():
    counter = iter(range(1, 100_000))
    holders = {"site-01": 1, "site-02": 2, "site-03": 3}

    dealt = deal_shares(
        (b"k" * 32, b"s" * 32), holders, 2, lambda size: bytes(next(counter) % 256 for _ in range(size))
    )

    assert dealt.keys() == holders.keys()
    assert len({share for pair in dealt.values() for share in pair}) == 6
    assert {len(share) for pair in dealt.values() for share in pair} == {2 * SHARE_BYTES}


# views

GRAPH = {name: tuple(other for other in NAMES if other != name) for name in NAMES}
"""Everyone is everyone's neighbour."""


def test_a_client_goes_on_while_enough_are_here_and_not_with_one_fewer():
    enough = NAMES[: TERMS.consent_threshold]

    check_view(TERMS, GRAPH, NAMES[0], NAMES)
    check_view(TERMS, GRAPH, NAMES[0], enough)
    assert refusal_of(lambda: check_view(TERMS, GRAPH, NAMES[0], enough[:-1])) == SumRefusal.TOO_FEW
    assert refusal_of(lambda: check_view(TERMS, GRAPH, NAMES[0], NAMES[1:])) == SumRefusal.NOT_INCLUDED


def lonely_graph(num_here: int) -> dict[str, tuple[str, ...]]:
    """A graph in which the first client has so many neighbours that are here."""
    absent = tuple(f"absent-{number}" for number in range(9))
    return {**GRAPH, NAMES[0]: (*NAMES[1 : num_here + 1], *absent)}


def test_a_client_needs_as_many_neighbours_as_give_a_secret_back():
    shares = TERMS.graph_degree.shares

    check_view(TERMS, lonely_graph(shares), NAMES[0], NAMES)
    check_included(TERMS, lonely_graph(shares), NAMES, NAMES)
    for act in (
        lambda: check_view(TERMS, lonely_graph(shares - 1), NAMES[0], NAMES),
        lambda: check_included(TERMS, lonely_graph(shares - 1), NAMES, NAMES),
    ):
        assert refusal_of(act) == SumRefusal.TOO_FEW


def test_a_sum_is_of_enough_clients_and_only_of_those_that_shared():
    enough = NAMES[: TERMS.consent_threshold]

    check_included(TERMS, GRAPH, NAMES, enough)
    assert refusal_of(lambda: check_included(TERMS, GRAPH, NAMES, enough[:-1])) == SumRefusal.TOO_FEW
    assert refusal_of(lambda: check_included(TERMS, GRAPH, enough[:-1], enough)) == SumRefusal.OTHER_VIEW


def consents(names, included: str = "c" * 64) -> list[Consent]:
    return [Consent(terms=TERMS.terms_digest, sender=name, included=included) for name in names]


def test_a_server_that_shows_two_sums_gets_the_consent_of_two_thirds_for_neither():
    included = dict.fromkeys(NAMES, "d" * 64)
    enough = NAMES[: TERMS.consent_threshold]

    check_consents(TERMS, included, "c" * 64, consents(enough))
    for reason, given in (
        (SumRefusal.TOO_FEW, consents(enough[:-1])),
        (SumRefusal.OTHER_VIEW, [*consents(enough[:-1]), *consents(enough[-1:], "e" * 64)]),
        (SumRefusal.MALFORMED, [*consents(enough), *consents(enough[:1])]),
        (SumRefusal.MALFORMED, [*consents(enough[:-1]), *consents(["stranger"])]),
    ):
        assert refusal_of(lambda given=given: check_consents(TERMS, included, "c" * 64, given)) == reason
    # more than two thirds: two such groups have a client in common, even with all that may lie on both sides
    assert 2 * TERMS.consent_threshold > len(NAMES) + TERMS.max_colluding
