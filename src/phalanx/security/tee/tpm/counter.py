"""A monotonic counter in a TPM's non-volatile memory."""

import struct

from phalanx.errors import RollbackError, TpmError
from phalanx.security.tee.tpm import wire
from phalanx.security.tee.tpm.device import TpmDevice
from phalanx.security.tee.tpm.wire import TpmCommand

FIRST_INDEX = 0x01800000
"""Begin of the range that the TCG leaves to owners of a machine."""
_OWNER_WRITES, _WRITES, _OWNER_READS, _READS, _NO_LOCKOUT = 1 << 1, 1 << 2, 1 << 17, 1 << 18, 1 << 25
_COUNTER, _KIND_MASK, _ORDERLY = 1 << 4, 0xF << 4, 1 << 26
_ATTRIBUTES = _OWNER_WRITES | _WRITES | _OWNER_READS | _READS | _NO_LOCKOUT | _COUNTER
_SIZE_BYTES = 8


class TpmCounter:
    """A `MonotonicCounter` that the TPM itself only lets go up.

    One that is deleted and made again begins above every number that any counter of its TPM has ever had. Not
    proof against a host that can turn back the TPM: one that runs it as a program copies its state, and
    `rollback_proof` is False then. Chips limit how often a counter is raised: this is for starts and sealed states, not
    for steps.

    Args:
        index: NV index of the counter; made by `create_counter`.
    """

    def __init__(self, tpm: TpmDevice, index: int = FIRST_INDEX) -> None:
        self._tpm, self._index = tpm, index
        try:
            self.rollback_proof = not tpm.is_software
            public = tpm.send_command(TpmCommand.NV_READ_PUBLIC, (index,), b"").read_sized(2, 512)
        except TpmError as exc:
            raise RollbackError(
                f"{self}: is not there ({exc}); a party's counter is created once, when it is set up"
            ) from exc
        attributes = int.from_bytes(public[6:10], "big")
        if attributes & _KIND_MASK != _COUNTER or attributes & _ORDERLY:
            raise RollbackError(f"{self}: something else lies there, attributes {attributes:#x}; choose another index")

    @classmethod
    def create_counter(cls, tpm: TpmDevice, index: int = FIRST_INDEX) -> "TpmCounter":
        """Make a counter, once for each party and purpose."""
        public = (
            struct.pack(">IHI", index, wire.SHA256, _ATTRIBUTES)
            + wire.size_prefixed(b"")
            + struct.pack(">H", _SIZE_BYTES)
        )
        try:
            parameters = wire.size_prefixed(b"") + wire.size_prefixed(public)
            tpm.send_command(TpmCommand.NV_DEFINE_SPACE, (wire.OWNER,), parameters, wire.password_authorisation())
            # before it is raised once, a counter has no number
            tpm.send_command(TpmCommand.NV_INCREMENT, (index, index), b"", wire.password_authorisation())
        except TpmError as exc:
            raise RollbackError(f"TPM counter {index:#x}: cannot be made ({exc}); does one lie there already?") from exc
        return cls(tpm, index)

    def read_count(self) -> int:
        """As `MonotonicCounter` says."""
        try:
            part = struct.pack(">HH", _SIZE_BYTES, 0)
            answer = self._tpm.send_command(
                TpmCommand.NV_READ, (self._index, self._index), part, wire.password_authorisation()
            )
            return int.from_bytes(answer.read_sized(2, _SIZE_BYTES), "big")
        except TpmError as exc:
            raise RollbackError(f"{self}: cannot be read ({exc})") from exc

    def increment(self) -> int:
        """Raise the counter by one and return it; `RollbackError` if another process raises it at the same time."""
        before = self.read_count()
        try:
            self._tpm.send_command(
                TpmCommand.NV_INCREMENT, (self._index, self._index), b"", wire.password_authorisation()
            )
        except TpmError as exc:
            raise RollbackError(f"{self}: cannot be raised ({exc})") from exc
        # the TPM does not say which number it gave: only where one step lies between was it this caller's
        if (after := self.read_count()) != before + 1:
            raise RollbackError(f"{self}: went from {before} to {after} at once: somebody else raises it as well")
        return after

    def __repr__(self) -> str:
        return f"TPM counter {self._index:#x}"
