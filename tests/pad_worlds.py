"""What can happen to a pad ledger: a disk that loses power and is rolled back, a counter, a generator that is stuck."""

from dataclasses import dataclass, field

import numpy as np

from phalanx.security.mask import AesPads, PadLedger, begin_ledger
from phalanx.security.mask.pads import Pad

MASTER = bytes(range(32))
RUN = "run-1"


class PowerCutError(Exception):
    """The process is gone at this very point."""


@dataclass
class Disk:
    """A record in memory with all of its past.

    `cut` says when the power fails at the next write: before it reaches the disk, or after it.
    """

    data: bytes | None = None
    past: list[bytes | None] = field(default_factory=lambda: [None])
    cut: str = ""

    def read_record(self):
        return self.data

    def write_record(self, data):
        cut, self.cut = self.cut, ""
        if cut != "before":
            self.data = data
            self.past.append(data)
        if cut:
            raise PowerCutError


class ForgetfulDisk(Disk):
    """Says that it has written and has not: what happens where a range is noted after its use, or never forced."""

    def write_record(self, data):
        if self.data is None:
            super().write_record(data)


@dataclass
class Counter:
    """A hardware counter that cannot be set back; `cut` fails the power before or after the next increment."""

    value: int = 7
    cut: str = ""

    def read_count(self):
        return self.value

    def increment(self):
        cut, self.cut = self.cut, ""
        if cut == "before":
            raise PowerCutError
        self.value += 1
        if cut:
            raise PowerCutError
        return self.value


def stuck(count):
    """A generator that always gives the same bytes, as in a machine that was set back with everything in it."""
    return bytes(count)


def new_ledger(disk=None, **settings):
    """A ledger that has just been begun."""
    disk = Disk() if disk is None else disk
    begin_ledger(disk, MASTER, RUN, settings.get("counter"))
    return PadLedger(disk, MASTER, RUN, **settings)


def aes_pads(ledger, *about):
    """Pads of a ledger."""
    return AesPads(ledger, MASTER, about or (RUN, "layer", "forward"))


class StuckPads:
    """The same pad again and again: the mistake that the ledger exists against."""

    def __init__(self, seed=0):
        self._seed = seed

    def draw_pad(self, rows, columns):
        values = np.random.default_rng(self._seed).integers(0, 2**31 - 1, (rows, columns), dtype=np.uint32)
        return Pad(0, values)
