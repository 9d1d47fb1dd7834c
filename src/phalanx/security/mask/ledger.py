"""A ledger of spent one-time pads: a range of numbers is written down as used before the first of them is.

Four things keep a pad from being made twice, each sufficient against some of what can happen:

- numbers only grow, and are written down before they are used: a crash or a restart skips numbers and repeats none;
- an *epoch*, raised at each opening, is in every key: two processes never share keys, even on the same numbers;
- every range has 16 fresh random bytes in its key: an older record that is put back repeats numbers, not keys;
- a hardware counter, where there is one, shows that an older record was put back, and that memory was copied.
"""

import hmac
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import Field, ValidationError

from phalanx.config import StrictModel, canonical_json
from phalanx.errors import PadError
from phalanx.security.crypto import MonotonicCounter, in_domain, parse_canonical


class LedgerStore(Protocol):
    """One small record that outlives the process."""

    def read_record(self) -> bytes | None:
        """Return the bytes that were written last; None if nothing ever was."""

    def write_record(self, data: bytes) -> None:
        """Replace the record; when this returns, a crash of the machine does not undo it."""


MAX_PADS = 2**24
"""Pads in one range at most: with `pads.MAX_ELEMENTS` it bounds what is encrypted under one key."""
_KEY_BYTES, _SALT_BYTES = 32, 16


class LedgerRecord(StrictModel):
    """The record that a store keeps; the key that authenticates it is of one run and one master key.

    Attributes:
        epoch: Epoch of the process that wrote the record.
        reserved: All numbers below this one count as used.
        counter: Value of the hardware counter from which on the record holds; 0 where there is none.
    """

    epoch: int = Field(ge=0)
    reserved: int = Field(ge=0)
    counter: int = Field(ge=0)


@dataclass(frozen=True)
class PadTicket:
    """The right to make one pad.

    Attributes:
        number: Number of the pad; never given out again.
    """

    epoch: int
    number: int
    salt: bytes


class PadLedger:
    """A ledger that gives out each pad's number once, through crashes, restarts, rollbacks and forks.

    Args:
        master: 32 secret bytes; the record is authenticated with a key made of them.
        range_size: Numbers that are written down at once; so many are lost in a restart, and so many pads can a copy
            of this process's memory make again before it is found out.
        counter: A hardware counter of this ledger alone; None leaves rollbacks to the random bytes.
        fresh: ``fresh(n)`` returns n random bytes.

    Raises:
        PadError: There is no record (`begin_ledger` writes the first), it was altered, is of another run, or is older
            than the counter says.
    """

    def __init__(
        self,
        store: LedgerStore,
        master: bytes,
        run: str,
        range_size: int = 1024,
        counter: MonotonicCounter | None = None,
        fresh: Callable[[int], bytes] = os.urandom,
    ) -> None:
        if not 1 <= range_size <= MAX_PADS:
            raise PadError(f"pad ledger: a range has {range_size} numbers, expected 1 to {MAX_PADS}")
        self._store, self._run, self._range_size, self._counter = store, run, range_size, counter
        self._fresh, self._pid, self._lock = fresh, os.getpid(), threading.Lock()
        self._mac_key = _mac_key(master, run)
        last = self._read_record()
        self._next = self._end = last.reserved
        self._last = LedgerRecord(epoch=last.epoch + 1, reserved=last.reserved, counter=last.counter)
        self._salt, self._is_sound = b"", True

    def take_ticket(self) -> PadTicket:
        """Give out the next number.

        Raises:
            PadError: The next range could not be written down; the hardware counter was raised by another process, or
                failed; or this process was forked from the process that opened the ledger.

        Guarantees:
            No two tickets lead to the same key and number. Safe to use from several threads.
        """
        if os.getpid() != self._pid:
            raise PadError("pad ledger: was opened before this process was forked; open it in one of them only")
        with self._lock:
            if not self._is_sound:
                raise PadError("pad ledger: its counter failed; open the ledger again")
            if self._next == self._end:
                self._reserve_range()
            number = self._next
            self._next += 1
            return PadTicket(self._last.epoch, number, self._salt)

    def _reserve_range(self) -> None:
        counter = self._last.counter + 1 if self._counter is not None else 0
        record = LedgerRecord(epoch=self._last.epoch, reserved=self._end + self._range_size, counter=counter)
        self._store.write_record(_seal_record(record, self._mac_key))
        if self._counter is not None:
            # where the counter failed, its value is unknown: opening the ledger finds out
            self._is_sound = False
            _raise_to(self._counter, counter)
            self._is_sound = True
        # only now: whatever failed above leaves this ledger without numbers
        self._last, self._end, self._salt = record, record.reserved, self._fresh(_SALT_BYTES)

    def _read_record(self) -> LedgerRecord:
        data = self._store.read_record()
        if data is None:
            raise PadError("pad ledger: is missing; bring it back, or begin a new one under a new master key")
        record = _open_record(data, self._mac_key)
        if self._counter is not None and record.counter < (now := self._counter.read_count()):
            raise PadError(
                f"pad ledger: is of counter value {record.counter}, the counter is at {now}: an older ledger was put "
                "back, or it is another ledger's counter; begin a new one under a new master key"
            )
        return record

    def __repr__(self) -> str:
        return f"PadLedger(run={self._run!r}, epoch={self._last.epoch})"


def begin_ledger(store: LedgerStore, master: bytes, run: str, counter: MonotonicCounter | None = None) -> None:
    """Write the first record, once for each master key."""
    if store.read_record() is not None:
        raise PadError("pad ledger: exists already; open it, or name a new file")
    record = LedgerRecord(epoch=0, reserved=0, counter=0 if counter is None else counter.read_count())
    store.write_record(_seal_record(record, _mac_key(master, run)))


def derive_pad_key(secret: bytes, salt: bytes, about: list[str | int]) -> bytes:
    """Return 32 bytes made of a secret for one purpose, by HKDF-SHA256."""
    if len(secret) != _KEY_BYTES:
        raise PadError(f"pads: the master key has {len(secret)} bytes, expected {_KEY_BYTES}")
    info = in_domain("mask-key/1", canonical_json(about))
    return HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=salt, info=info).derive(secret)


def _raise_to(counter: MonotonicCounter, target: int) -> None:
    """Raise the counter at least once and up to the value that the record names.

    After a crash between writing and raising, the record is ahead of the counter by more than one.
    """
    while (value := counter.increment()) < target:
        pass
    if value != target:
        raise PadError(
            f"pad ledger: the counter is at {value}, expected {target}: somebody else uses this ledger or its counter"
        )


def _mac_key(master: bytes, run: str) -> bytes:
    return derive_pad_key(master, b"", ["ledger", run])


def _seal_record(record: LedgerRecord, key: bytes) -> bytes:
    body = record.model_dump(mode="json")
    return canonical_json({"body": body, "mac": _record_mac(body, key).hex()})


def _open_record(data: bytes, key: bytes) -> LedgerRecord:
    try:
        envelope = parse_canonical(data)
        body, mac = envelope["body"], bytes.fromhex(envelope["mac"])
        if not hmac.compare_digest(mac, _record_mac(body, key)):
            raise PadError("pad ledger: was altered, or is of another run or master key; bring the right one back")
        return LedgerRecord.model_validate(body)
    except (ValueError, KeyError, TypeError, ValidationError) as exc:
        raise PadError("pad ledger: malformed; it is written whole or not at all, so it was altered") from exc


def _record_mac(body: dict[str, object], key: bytes) -> bytes:
    return hmac.digest(key, in_domain("mask-ledger/1", canonical_json(body)), "sha256")
