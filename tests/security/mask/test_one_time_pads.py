import os

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB

from pad_worlds import MASTER, RUN, aes_pads, new_ledger
from phalanx.errors import PadError
from phalanx.security.mask import AesPads, OsPads, P
from phalanx.security.mask.pads import MAX_ELEMENTS, draw_elements, open_keystream
from seeded_entropy import bytes_from

SOURCES = pytest.mark.parametrize(
    "make", [lambda: aes_pads(new_ledger(fresh=bytes_from(1))), OsPads], ids=["aes", "operating system"]
)
BINS = 1024
# mean 1023, standard deviation 45: six of them to either side
LEAST, MOST = 1023 - 6 * 45.3, 1023 + 6 * 45.3


@pytest.fixture(autouse=True)
def seeded(monkeypatch):
    """The operating system's generator draws of a seed: even six deviations are met once in a hundred million runs."""
    monkeypatch.setattr(os, "urandom", bytes_from(2))


def chi_square(counts):
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


def bins_of(values):
    """How often the upper and the lower ten of the 31 bits have each value."""
    upper = np.bincount(values >> 21, minlength=BINS)
    lower = np.bincount(values & 1023, minlength=BINS)
    return upper, lower


@SOURCES
def test_pads_are_spread_evenly_over_the_ring(make):
    values = make().draw_pad(1000, 1000).take_values().ravel()

    assert values.max() < P
    for counts in bins_of(values):
        assert LEAST < chi_square(counts) < MOST


@pytest.mark.slow
def test_a_billion_elements_are_spread_evenly_over_the_ring():
    pads, totals = aes_pads(new_ledger(fresh=bytes_from(1))), [np.zeros(BINS, np.int64)] * 2
    for _ in range(120):
        counts = bins_of(pads.draw_pad(2**11, 2**12).take_values().ravel())
        totals = [total + more for total, more in zip(totals, counts, strict=True)]

    assert totals[0].sum() > 10**9
    for counts in totals:
        assert LEAST < chi_square(counts) < MOST


def test_a_word_that_is_p_is_skipped_and_not_folded_onto_zero():
    stream = iter([[P, 5, 2**31 + 6, 2**32 - 1], [P, 0], [2**31]])

    values = draw_elements(4, lambda count: np.array(next(stream), np.uint32))

    assert values.tolist() == [5, 6, 0, 0]


def test_the_key_stream_is_aes_of_number_and_block():
    key, number = os.urandom(32), 2**40 + 3
    aes = Cipher(AES256(key), ECB()).encryptor()

    words = np.concatenate([open_keystream(key, number)(5), np.empty(0, np.uint32)])

    blocks = b"".join(aes.update(number.to_bytes(8, "big") + i.to_bytes(8, "big")) for i in range(2))
    assert words.tobytes() == blocks[:20]


def test_a_long_pad_is_the_key_stream_without_its_top_bits():
    ledger = new_ledger()
    pads = aes_pads(ledger)
    key = pads.range_key(ledger.take_ticket())

    values = pads.draw_pad(3, 2**18).take_values().ravel()

    words = open_keystream(key, 1)
    drawn = np.concatenate([words(2**18) for _ in range(3)]) & np.uint32(P)
    # one key in 2,700 has a word among these that no pad takes
    taken = drawn[drawn != P]
    assert (values[: len(taken)] == taken).all()


def test_layers_directions_runs_and_master_keys_have_pads_of_their_own():
    ledger = new_ledger()
    ticket = ledger.take_ticket()
    keys = [
        AesPads(ledger, MASTER, (RUN, "layer", "forward")).range_key(ticket),
        AesPads(ledger, MASTER, (RUN, "layer", "backward")).range_key(ticket),
        AesPads(ledger, MASTER, (RUN, "other", "forward")).range_key(ticket),
        AesPads(ledger, MASTER, ("run-2", "layer", "forward")).range_key(ticket),
        AesPads(ledger, bytes(32), (RUN, "layer", "forward")).range_key(ticket),
    ]

    assert len(set(keys)) == len(keys)


def test_a_key_that_is_kept_is_that_of_its_range_and_no_other():
    ledger = new_ledger(range_size=2)
    tickets = [ledger.take_ticket() for _ in range(5)]
    pads = aes_pads(ledger)

    kept = [pads.range_key(ticket) for ticket in (*tickets, tickets[0])]

    assert kept == [aes_pads(ledger).range_key(ticket) for ticket in (*tickets, tickets[0])]
    assert len(set(kept)) == 3


@SOURCES
def test_no_two_pads_are_alike(make):
    pads = make()

    first, second = pads.draw_pad(4, 4), pads.draw_pad(4, 4)

    assert first.number != second.number
    assert not (first.take_values() == second.take_values()).any()


@SOURCES
def test_a_pad_is_taken_once(make):
    pad = make().draw_pad(1, 1)
    pad.take_values()

    with pytest.raises(PadError, match=r"^pad 0: was used; a second use would reveal"):
        pad.take_values()


@SOURCES
@pytest.mark.parametrize("size", [(0, 1), (1, 0), (-1, 1), (1, MAX_ELEMENTS + 1)])
def test_pads_of_no_size_or_too_large_ones_are_refused(make, size):
    with pytest.raises(PadError, match="elements asked for"):
        make().draw_pad(*size)


def test_a_number_beyond_64_bits_is_refused():
    with pytest.raises(PadError, match="all numbers of this ledger are used"):
        open_keystream(bytes(32), 2**64)


def test_nothing_secret_is_shown():
    pads = aes_pads(new_ledger())
    pad = pads.draw_pad(1, 1)
    value = int(pad.take_values()[0, 0])

    shown = repr(pads) + repr(pad)

    assert str(value) not in shown
    assert MASTER.hex() not in shown
    assert repr(MASTER) not in shown
