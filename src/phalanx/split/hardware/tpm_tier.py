"""An enclave's means in a TPM: quotes, a key that opens in one state of the machine, three counters of its own."""

import contextlib
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import RollbackError
from phalanx.security.crypto import read_private, write_private
from phalanx.security.seal import MonotonicCounter
from phalanx.security.tee import Attester, TpmAttester, TpmCounter, TpmDevice, TpmSealer, open_tpm

PURPOSES = ("epoch", "sealed", "settled")
_FIRST_INDEX, _NUM_SLOTS = 0x01800000, 2**19
_SECRET = struct.Struct(">32sI3Q")


class CountFromStart:
    """A counter that begins at 0, on one of a TPM, which begins above every number that the TPM has ever given.

    Args:
        start: First number of the counter.
    """

    def __init__(self, counter: TpmCounter, start: int) -> None:
        self._counter, self._start = counter, start
        self.rollback_proof = counter.rollback_proof

    def read_count(self) -> int:
        """As `MonotonicCounter` says."""
        return self._from_start(self._counter.read_count())

    def increment(self) -> int:
        """As `MonotonicCounter` says."""
        return self._from_start(self._counter.increment())

    def _from_start(self, number: int) -> int:
        if number < self._start:
            raise RollbackError(f"TPM counter: is at {number}, but started at {self._start}; the TPM was reset")
        return number - self._start


@dataclass(frozen=True)
class TpmMeans:
    """The means of an enclave in a TPM.

    Attributes:
        attester: Quotes PCRs 0 to 7.
        key: 32 bytes, sealed to the state of those PCRs.
    """

    attester: Attester
    key: bytes
    _device: TpmDevice
    _base: int
    _starts: tuple[int, ...]
    _opened: contextlib.ExitStack

    def counter_for(self, purpose: str) -> MonotonicCounter:
        """Return the counter of one of `PURPOSES`."""
        slot = PURPOSES.index(purpose)
        return CountFromStart(TpmCounter(self._device, self._base + slot), self._starts[slot])

    def close(self) -> None:
        """Let go of the TPM."""
        self._opened.close()


def open_tpm_tier(directory: Path, address: str) -> TpmMeans:
    """Open an enclave's means, and make them at its first start.

    Args:
        directory: The enclave's own; gets one sealed file.

    Raises:
        TpmError: The TPM is not there, or the machine is in another state than at the first start.
        RollbackError: A counter is gone.
    """
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(open_tpm(address))
        attester, sealer = stack.enter_context(TpmAttester(device)), TpmSealer(device)
        path = directory / "tpm.sealed"
        if not path.exists():
            write_private(path, sealer.seal_secret(_make_secret(device)))
        key, base, *starts = _SECRET.unpack(
            sealer.unseal_secret(read_private(path, "the enclave makes it at its first start"))
        )
        return TpmMeans(attester, key, device, base, tuple(starts), stack.pop_all())


def _make_secret(device: TpmDevice) -> bytes:
    """Make a key, and the place and beginning of fresh counters: moving those to others takes the sealed file."""
    base = _FIRST_INDEX + 4 * secrets.randbelow(_NUM_SLOTS)
    starts = [TpmCounter.create_counter(device, base + slot).read_count() for slot in range(len(PURPOSES))]
    return _SECRET.pack(secrets.token_bytes(32), base, *starts)
