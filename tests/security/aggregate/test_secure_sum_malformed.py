"""Bytes that are not what is due are refused by both sides, change nothing, and crash nothing."""

import random

import numpy as np
import pytest
from summed_round import CLIENTS, SERVER, clients_of, terms_of, values_for

from phalanx.errors import AggregationError
from phalanx.security.aggregate import SumServer
from phalanx.security.aggregate.messages import Advert, SignedMessage, decode_message

JUNK = [b"", b"{}", b"[]", b"null", b'"', b"\xff\xfe", b"0" * 5000, b"[" * 4000, b'{"body":{},"signature":""}']


class Stage:
    """One step of a round with the message that is due, and messages of other steps and rounds."""

    def __init__(self, take, due: bytes) -> None:
        self.take, self.due = take, due


def stages() -> tuple[list[tuple[str, Stage]], SumServer]:
    """Walk a round and yield, for each side and phase, what takes the message and the message."""
    terms = terms_of(4)
    server, clients = SumServer(terms, SERVER), clients_of(terms)
    values, first = values_for(terms), terms.client_names[0]

    def walk():
        adverts = {}
        yield "client join", Stage(clients[first].join_round, server.invitation)
        for name, one in clients.items():
            adverts[name] = one.join_round(server.invitation)
            if name == first:
                yield "server advert", Stage(server.take_advert, adverts[name])
            server.take_advert(adverts[name])
        everyone = server.close_adverts()
        yield "client share", Stage(clients[first].share_secrets, everyone)
        for name, one in clients.items():
            boxes = one.share_secrets(everyone)
            if name == first:
                yield "server boxes", Stage(server.take_boxes, boxes)
            server.take_boxes(boxes)
        deliveries = server.close_boxes()
        yield "client mask", Stage(lambda data: clients[first].mask_values(data, values[first]), deliveries[first])
        for name, one in clients.items():
            deposit = one.mask_values(deliveries[name], values[name])
            if name == first:
                yield (
                    "server deposit",
                    Stage(lambda data, d=deposit: server.take_deposit(data, d.values), deposit.message),
                )
            server.take_deposit(deposit.message, deposit.values)
        deposits = server.close_deposits()
        yield "client consent", Stage(clients[first].sign_consent, deposits)
        for name, one in clients.items():
            consent = one.sign_consent(deposits)
            if name == first:
                yield "server consent", Stage(server.take_consent, consent)
            server.take_consent(consent)
        consents = server.close_consents()
        yield "client release", Stage(clients[first].release_shares, consents)
        for name, one in clients.items():
            release = one.release_shares(consents)
            if name == first:
                yield "server release", Stage(server.take_release, release)
            server.take_release(release)

    return walk(), server


def mutants(draw: random.Random, due: bytes, others: list[bytes]):
    """Yield altered messages without end: none equals the one that is due."""
    while True:
        kind = draw.randrange(6)
        data = bytearray(due)
        if kind == 0:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[draw.randrange(len(data)) :]
        elif kind == 2:
            start, size = draw.randrange(len(data)), draw.randrange(1, 80)
            data[start : start + size] = draw.randbytes(draw.randrange(80))
        elif kind == 3:
            data += draw.randbytes(draw.randrange(1, 20))
        elif kind == 4:
            data = bytearray(draw.choice(others))
        else:
            # a digit of a number, a key or a signature
            places = [
                i for i in draw.sample(range(len(data)), min(40, len(data))) if chr(data[i]) in "0123456789abcdef"
            ]
            for place in places[:1]:
                data[place] = ord(draw.choice("0123456789abcdef"))
        if bytes(data) != due:
            yield bytes(data)


def refuse_all(each_stage: int, seed: int) -> int:
    draw, refused, others = random.Random(seed), 0, list(JUNK)
    walk, server = stages()
    for name, stage in walk:
        source = mutants(draw, stage.due, others)
        for _ in range(each_stage):
            data = next(source)
            try:
                stage.take(data)
            except AggregationError:
                refused += 1
            else:
                pytest.fail(f"{name}: accepted {data[:200]!r}")
        others.append(stage.due)
    assert len(server.unmask_sum().contributors) == 4
    return refused


def test_thousands_of_altered_messages_are_refused_and_the_round_ends_all_the_same():
    assert refuse_all(each_stage=400, seed=1) == 4000


@pytest.mark.slow
def test_a_million_altered_messages_are_refused():
    assert sum(refuse_all(each_stage=2000, seed=seed) for seed in range(2, 52)) == 1_000_000


def test_messages_of_another_round_and_of_another_kind_are_refused():
    one, other = terms_of(4), terms_of(4, round=2)
    server = SumServer(one, SERVER)
    foreign = clients_of(other)[other.client_names[0]].join_round(SumServer(other, SERVER).invitation)

    with pytest.raises(AggregationError, match="foreign_terms"):
        server.take_advert(foreign)
    with pytest.raises(AggregationError, match="malformed"):
        server.take_consent(foreign) if server.phase.name == "CONSENTS" else decode_message(foreign, SignedMessage)
    with pytest.raises(AggregationError, match="out_of_phase"):
        server.take_boxes(foreign)


def test_a_message_is_read_once_and_in_turn():
    terms = terms_of(4)
    server, one = SumServer(terms, SERVER), clients_of(terms)[terms.client_names[0]]
    advert = one.join_round(server.invitation)
    server.take_advert(advert)

    with pytest.raises(AggregationError, match="out_of_phase"):
        server.take_advert(advert)
    with pytest.raises(AggregationError, match="out_of_phase"):
        one.join_round(server.invitation)
    with pytest.raises(AggregationError, match="out_of_phase"):
        one.release_shares(b"")
    with pytest.raises(AggregationError, match="too_few"):
        server.close_adverts()


def test_a_message_longer_than_any_of_its_kind_is_not_parsed():
    terms = terms_of(4)

    with pytest.raises(AggregationError, match="at most"):
        SumServer(terms, SERVER).take_boxes(b"x") if False else decode_message(b"[" * 10_000, SignedMessage[Advert], 4)


def test_neither_side_shows_a_secret_when_printed():
    terms = terms_of(4)
    one = clients_of(terms)[terms.client_names[0]]
    one.join_round(SumServer(terms, SERVER).invitation)

    assert repr(one) == "SumClient('site-00', ADVERTS)"
    assert one._seed.hex() not in str(vars(one)["_own_advert"])
    assert CLIENTS[0].name in repr(one)
    assert np.zeros(1).size
