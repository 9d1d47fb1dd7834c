"""One-time pads: elements of Z_p that are uniform, secret, and used once."""

import os
from collections.abc import Callable
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from phalanx.errors import PadError
from phalanx.security.mask.ledger import PadLedger, PadTicket, derive_pad_key
from phalanx.security.mask.ring import P, Ring

MAX_ELEMENTS = 2**26
"""Elements of one pad at most."""

Words = Callable[[int], NDArray[np.uint32]]
"""Gives the next so many random words of 32 bits."""

_WORD_BYTES = 4
_CHUNK = 2**15
"""Words drawn at once: memory that the allocator keeps, and that stays in the cache."""
_MAX_WORDS = 2**18
_ZEROS = bytes(_WORD_BYTES * _MAX_WORDS)


class Pad:
    """One pad; its elements can be taken once.

    Attributes:
        number: Tells pads apart; means nothing without the key.
    """

    def __init__(self, number: int, values: Ring) -> None:
        self.number = number
        self.shape: tuple[int, int] = (values.shape[0], values.shape[1])
        self._values: Ring | None = values

    def take_values(self) -> Ring:
        """Return the elements."""
        values, self._values = self._values, None
        if values is None:
            raise PadError(f"pad {self.number}: was used; a second use would reveal the difference of what is masked")
        return values

    def __repr__(self) -> str:
        return f"Pad({self.number}, shape={self.shape})"


class PadSource(Protocol):
    """A source of pads."""

    def draw_pad(self, rows: int, columns: int) -> Pad:
        """Make a pad."""


class AesPads:
    """Pads out of AES-256 in counter mode: secret as long as AES-256 is a pseudo-random permutation.

    A pad has the key of its range, layer and direction, and its number in the upper half of the counter, so no two pads
    share a block of key stream. At most 2^48 blocks are made with one key.

    Args:
        master: 32 secret bytes.
        about: Purpose of the pads, such as run, layer and direction.
    """

    def __init__(self, ledger: PadLedger, master: bytes, about: tuple[str, ...]) -> None:
        self._ledger, self._master, self._about = ledger, master, about
        self._latest: tuple[tuple[int, bytes], bytes] | None = None

    def draw_pad(self, rows: int, columns: int) -> Pad:
        """As `PadSource` says."""
        _check_size(rows, columns)
        ticket = self._ledger.take_ticket()
        values = draw_elements(rows * columns, open_keystream(self.range_key(ticket), ticket.number))
        return Pad(ticket.number, values.reshape(rows, columns))

    def range_key(self, ticket: PadTicket) -> bytes:
        """Return the key of the range that a number belongs to; derived once for the numbers that follow each other."""
        place, latest = (ticket.epoch, ticket.salt), self._latest
        if latest is not None and latest[0] == place:
            return latest[1]
        key = derive_pad_key(self._master, ticket.salt, ["pad", ticket.epoch, *self._about])
        self._latest = (place, key)
        return key

    def __repr__(self) -> str:
        return f"AesPads({'/'.join(self._about)})"


class OsPads:
    """Pads from the operating system's generator: no key could make one a second time, so they need no ledger.

    Many times slower than `AesPads`; one-time pads in the strict sense as far as that generator is one.
    """

    def __init__(self) -> None:
        self._next = 0

    def draw_pad(self, rows: int, columns: int) -> Pad:
        """As `PadSource` says."""
        _check_size(rows, columns)
        self._next += 1
        values = draw_elements(rows * columns, lambda count: np.frombuffer(os.urandom(_WORD_BYTES * count), "<u4"))
        return Pad(self._next - 1, values.reshape(rows, columns))


def draw_elements(count: int, words: Words) -> Ring:
    """Return uniform elements of Z_p, in the order of the words that they come from.

    Of each word the lower 31 bits count: 2^31 equally likely values, of which all but p itself are taken, and a
    word that is p is skipped.
    """
    elements = np.empty(count, np.uint32)
    filled = 0
    while filled < count:
        stop = min(count, filled + _CHUNK)
        drawn = np.bitwise_and(words(stop - filled), P, out=elements[filled:stop])
        # one in 2^31 words is not taken
        if drawn.max() == P:
            accepted = drawn[drawn != P]
            stop = filled + len(accepted)
            elements[filled:stop] = accepted
        filled = stop
    return elements


def open_keystream(key: bytes, number: int) -> Words:
    """Return the words of the AES-CTR key stream that begins with this block number, at most 2^18 at a time."""
    if not 0 <= number < 2**64:
        raise PadError("pads: all numbers of this ledger are used; begin a new run")
    encryptor = Cipher(AES256(key), CTR(number.to_bytes(8, "big") + bytes(8))).encryptor()

    def words(count: int) -> NDArray[np.uint32]:
        return np.frombuffer(encryptor.update(memoryview(_ZEROS)[: _WORD_BYTES * count]), "<u4")

    return words


def _check_size(rows: int, columns: int) -> None:
    if rows < 1 or columns < 1 or rows * columns > MAX_ELEMENTS:
        raise PadError(f"pads: {rows} x {columns} elements asked for, expected 1 to {MAX_ELEMENTS}; use fewer rows")
