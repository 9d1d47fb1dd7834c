"""Sources of an offload client's pads.

A pad is never needed again, by any party, once its answer is there. So the key that pads are made of need not outlive
the process, and where it does not, there is nothing that a restart or a rolled-back disk could make twice.
"""

import os
from collections.abc import Callable

from phalanx.security.mask import (
    AesPads,
    OsPads,
    PadLedger,
    PadSource,
    ProductMessage,
    begin_ledger,
)
from phalanx.split.masked.config import MaskedConfig

PadSources = Callable[[ProductMessage], PadSource]
"""Gives each product a source of its own."""

_KEY_BYTES = 32


class ProcessMemory:
    """A ledger's record that ends with the process, as the key does that it is about."""

    def __init__(self) -> None:
        self._data: bytes | None = None

    def read_record(self) -> bytes | None:
        """Return the last written value."""
        return self._data

    def write_record(self, data: bytes) -> None:
        """Keep it."""
        self._data = data


def pad_sources(config: MaskedConfig, run: str) -> PadSources:
    """Return the pad sources that a run file asks for."""
    return system_pads() if config.pads == "os" else process_pads(run)


def process_pads(run: str) -> PadSources:
    """Return sources under a fresh key that is kept in this process only."""
    master, memory = os.urandom(_KEY_BYTES), ProcessMemory()
    begin_ledger(memory, master, run)
    return ledger_pads(PadLedger(memory, master, run), master, run)


def ledger_pads(ledger: PadLedger, master: bytes, run: str) -> PadSources:
    """Return sources under a key that outlives the process, with a ledger that does as well.

    Args:
        master: The 32 secret bytes that it was begun with.
    """
    return lambda product: AesPads(ledger, master, (run, product.layer, product.direction))


def system_pads() -> PadSources:
    """Return sources that draw every pad from the operating system's generator."""
    return lambda product: OsPads()
