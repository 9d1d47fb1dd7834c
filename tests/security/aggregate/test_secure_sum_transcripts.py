"""What the server sees says nothing but the sum, and no key is guessable or used twice."""

import base64
import itertools
import random
from contextlib import suppress

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from summed_round import CLIENTS, SERVER, ForgetfulRounds, RoundsInMemory, Walk, expected_of, terms_of

from phalanx.errors import AggregationError
from phalanx.security.aggregate import RoundFile, SumClient, SumServer, client
from phalanx.security.aggregate.masks import add_masks, pair_key, self_mask
from phalanx.security.aggregate.shamir import combine_shares

LENGTH = 2**15
MOST = 5 * 255**0.5 + 2 * 25
"""Of chi squared with 255 degrees of freedom, further above the mean than a uniform sample ever is."""


def chi_squared(words: np.ndarray) -> float:
    """How far the bytes of some words are from equally many of each, above what is expected."""
    counts = np.bincount(words.view(np.uint8), minlength=256)
    mean = counts.sum() / 256
    return float(((counts - mean) ** 2 / mean).sum()) - 255


def without_self_masks(walk: Walk) -> dict[str, np.ndarray]:
    """The server's whole view of each client's values: what came, less the masks that it is told in the end."""
    from phalanx.security.aggregate import messages as m

    releases = {
        n: m.decode_message(one, m.SignedMessage[m.ShareRelease]).body for n, one in walk.seen["release"].items()
    }
    seen = {}
    for name, deposit in walk.seen["mask"].items():
        shares = {
            walk.terms.client_names.index(holder) + 1: bytes.fromhex(one.seed_shares[name])
            for holder, one in releases.items()
            if name in one.seed_shares
        }
        seed = combine_shares(dict(list(shares.items())[: walk.terms.graph_degree.shares]))
        seen[name] = deposit.values.copy()
        add_masks(seen[name], [self_mask(walk.terms.terms_digest, name, seed).cancelling_mask])
    return seen


def seeded_walk(values, seed: int) -> Walk:
    terms = terms_of(4, length=LENGTH, clip=1.0)
    walk = Walk(terms, dict(zip(terms.client_names, values, strict=True)))
    walk.clients = {
        one.name: SumClient(one, expected_of(terms), RoundsInMemory(), random.Random(seed + number).randbytes)
        for number, one in enumerate(CLIENTS[:4])
    }
    walk.run()
    return walk


def worst_subset(walk: Walk) -> float:
    """The least uniform sum over a proper part of the clients."""
    seen = without_self_masks(walk)
    parts = [part for size in (1, 2, 3) for part in itertools.combinations(seen.values(), size)]
    return max(chi_squared(np.sum(part, axis=0, dtype=np.uint32)) for part in parts)


def opposite_inputs():
    large = np.zeros(LENGTH)
    large[0] = 1.0
    return [np.zeros(LENGTH)] * 4, [large, -large, large, -large]


@pytest.mark.parametrize("inputs", [0, 1], ids=["all zero", "as large as can be, of the same sum"])
def test_the_view_of_the_server_is_uniform_but_for_the_sum_whatever_the_inputs(inputs):
    walk = seeded_walk(opposite_inputs()[inputs], seed=1)

    seen = without_self_masks(walk)

    assert worst_subset(walk) < MOST
    assert not np.sum(list(seen.values()), axis=0, dtype=np.uint32)[:-1].any()


def test_the_view_tells_the_inputs_where_clients_share_no_masks(monkeypatch):
    real = client.masked_values
    monkeypatch.setattr(client, "masked_values", lambda *given: real(*given[:-2], given[-2][-1:]))

    assert worst_subset(seeded_walk(opposite_inputs()[0], seed=1)) > 100 * MOST


def pair_keys(count: int) -> list[bytes]:
    private = [X25519PrivateKey.generate() for _ in range(count + 1)]
    public = [one.public_key().public_bytes_raw().hex() for one in private]
    return [pair_key("1" * 64, ("a", private[i]), ("b", public[i + 1])).key for i in range(count)]


def constant_bits(keys: list[bytes]) -> int:
    """Bits that are one, or zero, too often for chance (seven standard deviations)."""
    ones = np.unpackbits(np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1), axis=1).mean(axis=0)
    return int((np.abs(ones - 0.5) > 3.5 / len(keys) ** 0.5).sum())


def test_a_mask_key_has_256_bits_that_all_vary():
    keys = pair_keys(500)

    assert len(set(keys)) == 500
    assert {len(key) for key in keys} == {32}
    assert constant_bits(keys) == 0


def test_the_measure_finds_the_bits_that_a_seed_of_base64_text_lacks():
    texts = [base64.b64encode(key)[:32] for key in pair_keys(500)]

    assert constant_bits(texts) >= 32


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "run-2"},
        {"round": 2},
        {"run_digest": "3" * 64},
        {"model_digest": "3" * 64},
        {"clip": 2.0},
        {"length": 6},
        {"max_weight": 2},
        {"minimum": 4},
        {"cohort": terms_of(5).cohort},
    ],
)
def test_all_that_a_round_is_about_is_in_every_key(changes):
    base = terms_of(6)
    other = terms_of(6, **changes)
    one, two = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    there = ("b", two.public_key().public_bytes_raw().hex())

    assert base.terms_digest != other.terms_digest
    assert pair_key(base.terms_digest, ("a", one), there).key != pair_key(other.terms_digest, ("a", one), there).key
    assert self_mask(base.terms_digest, "a", b"s").key != self_mask(other.terms_digest, "a", b"s").key
    assert self_mask(base.terms_digest, "a", b"s").key != self_mask(base.terms_digest, "b", b"s").key


def test_both_ends_have_one_key_and_cancel_each_other():
    one, two = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    publics = [key.public_key().public_bytes_raw().hex() for key in (one, two)]

    here = pair_key("1" * 64, ("a", one), ("b", publics[1]))

    assert pair_key("1" * 64, ("b", two), ("a", publics[0])) == here.cancelling_mask


class Schedule:
    """A random story of rounds, crashes and restarts; it keeps the keys of every vector that left a client."""

    def __init__(self, seed: int, book, fresh=None) -> None:
        self.draw, self.fresh = random.Random(seed), fresh
        self.books = {one.name: book(one.name) for one in CLIENTS[:4]}
        self.used: dict[bytes, set[tuple[str, bytes]]] = {}

    def run(self, rounds: int, monkeypatch) -> None:
        real = client.masked_values

        def recording(values, encoding, scale_and_weight, rounding_key, masks, noise):
            out = real(values, encoding, scale_and_weight, rounding_key, masks, noise)
            for mask in masks:
                self.used.setdefault(mask.key, set()).add((self.current, out.tobytes()))
            return out

        monkeypatch.setattr(client, "masked_values", recording)
        number = 0
        for _ in range(rounds):
            number += self.draw.choice([0, 1, 1])
            self.one_round(max(number, 1))
        monkeypatch.setattr(client, "masked_values", real)

    def one_round(self, number: int) -> None:
        """A round in which a client may die before it says something, and is started again."""
        terms = terms_of(4, round=number)
        server = SumServer(terms, SERVER)
        clients = {one.name: self.start(one, terms) for one in CLIENTS[:4]}
        with suppress(AggregationError):
            for say, take in self.phases(server, clients):
                for one in CLIENTS[:4]:
                    self.current = one.name
                    if self.draw.random() < 0.05:
                        clients[one.name] = self.start(one, terms)
                    # the server may ask once more for what was said
                    for _ in range(self.draw.choice([1, 1, 2])):
                        with suppress(AggregationError):
                            take(say(one.name))

    def phases(self, server, clients):
        yield lambda name: clients[name].join_round(server.invitation), server.take_advert
        adverts = server.close_adverts()
        yield lambda name: clients[name].share_secrets(adverts), server.take_boxes
        deliveries = server.close_boxes()
        yield (
            lambda name: clients[name].mask_values(deliveries.get(name, b""), np.full(5, self.draw.random() / 9)),
            lambda deposit: server.take_deposit(deposit.message, deposit.values),
        )

    def start(self, identity, terms) -> SumClient:
        given = () if self.fresh is None else (self.fresh(identity.name),)
        return SumClient(identity, expected_of(terms), self.books[identity.name], *given)

    def repeated(self) -> int:
        """Keys under which one client masked two vectors, or that more than two clients used."""
        return sum(len({name for name, _ in uses}) < len(uses) or len(uses) > 2 for uses in self.used.values())


def test_no_mask_covers_two_vectors_over_crashes_with_a_book_on_disk(tmp_path, monkeypatch):
    used = 0
    for seed in range(4):
        schedule = Schedule(seed, lambda name, seed=seed: RoundFile(tmp_path / f"{seed}-{name}"))
        schedule.run(4, monkeypatch)
        used += len(schedule.used)
        assert schedule.repeated() == 0
    assert used > 30


@pytest.mark.slow
def test_no_mask_covers_two_vectors_in_ten_thousand_schedules(monkeypatch):
    used = 0
    for seed in range(10_000):
        schedule = Schedule(seed, lambda _: RoundsInMemory())
        schedule.run(3, monkeypatch)
        used += len(schedule.used)
        assert schedule.repeated() == 0
    assert used > 10_000


def test_a_restored_machine_repeats_its_masks_where_rounds_are_not_written_down(monkeypatch):
    repeated = 0
    for seed in range(2):
        schedule = Schedule(seed, lambda _: ForgetfulRounds(), lambda name: random.Random(name).randbytes)
        schedule.run(6, monkeypatch)
        repeated += schedule.repeated()
    assert repeated > 0


def test_a_round_file_goes_on_after_a_restart_and_keeps_runs_apart(tmp_path):
    RoundFile(tmp_path).enter_round("run-1", 5)

    with pytest.raises(AggregationError, match="repeated_round"):
        RoundFile(tmp_path).enter_round("run-1", 5)
    with pytest.raises(AggregationError, match="repeated_round"):
        RoundFile(tmp_path).enter_round("run-1", 4)
    RoundFile(tmp_path).enter_round("run-1", 6)
    RoundFile(tmp_path).enter_round("run-2", 1)
