"""A TPM as a session of commands: keys, quotes, PCRs, counters; no daemon and no library of a vendor between.

A device on the bus to the chip can read the commands: their parameters are not encrypted.
"""

import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from phalanx.closing import Closeable
from phalanx.errors import TpmError
from phalanx.security.tee.tpm import wire
from phalanx.security.tee.tpm.link import DEFAULT_ADDRESS, TpmLink, open_link
from phalanx.security.tee.tpm.wire import TpmCommand, TpmResponse

_PROPERTIES, _MANUFACTURER = 6, 0x105
_PCRS_AT_ONCE, _NV_BYTES_AT_ONCE = 8, 512
_TRY_AGAIN = (0x908, 0x920, 0x922)
"""TPM_RC_YIELDED, NV_RATE and RETRY: nothing was done, and the same command will be."""
_PAUSES_S = (0.0, 0.001, 0.01, 0.1, 1.0)
_SOFTWARE_MAKERS = ("IBM", "MSFT", "GOOG", "AMZN", "XEN", "SW")
"""Makers of TPMs that are programs, as far as known; such a TPM holds what its host lets it hold."""


class TpmDevice(Closeable):
    """One connection to a TPM 2.0.

    Guarantees:
        Every object and session that a method made is removed again, except a returned handle.
    """

    def __init__(self, link: TpmLink) -> None:
        self._link = link

    @property
    def is_software(self) -> bool:
        """Whether it is known to be a program, which its host can read and turn back."""
        return self._link.is_software or self.read_manufacturer().upper().startswith(_SOFTWARE_MAKERS)

    def read_manufacturer(self) -> str:
        """Return the maker that the TPM names."""
        answer = self.send_command(TpmCommand.GET_CAPABILITY, (), struct.pack(">III", _PROPERTIES, _MANUFACTURER, 1))
        answer.take_bytes(1 + 4 + 4 + 4)
        return answer.take_bytes(4).rstrip(b"\0 ").decode("ascii", "replace")

    def send_command(
        self, code: TpmCommand, handles: Sequence[int], parameters: bytes, *sessions: bytes
    ) -> TpmResponse:
        """Run a command that returns no handle."""
        return self._run_command(code, handles, parameters, sessions, with_handle=False)[1]

    def make_object(
        self, code: TpmCommand, handles: Sequence[int], parameters: bytes, *sessions: bytes
    ) -> tuple[int, TpmResponse]:
        """Run a command that makes an object or a session, and return its handle first; the caller removes it."""
        return self._run_command(code, handles, parameters, sessions, with_handle=True)

    def flush_object(self, handle: int) -> None:
        """Remove an object or a session."""
        self.send_command(TpmCommand.FLUSH_CONTEXT, (), struct.pack(">I", handle))

    @contextmanager
    def primary_key(self, hierarchy: int, template: bytes) -> Iterator[tuple[int, bytes]]:
        """Make a primary key, the same one each time; it is removed at the end.

        Yields:
            Its handle, and its public area (TPMT_PUBLIC).
        """
        handle, public = self.make_primary(hierarchy, template)
        try:
            yield handle, public
        finally:
            self.flush_object(handle)

    def make_primary(self, hierarchy: int, template: bytes) -> tuple[int, bytes]:
        """Make a primary key and return its handle and public area; the caller removes it."""
        parameters = (
            wire.sensitive_area() + wire.size_prefixed(template) + wire.size_prefixed(b"") + struct.pack(">I", 0)
        )
        handle, answer = self.make_object(
            TpmCommand.CREATE_PRIMARY, (hierarchy,), parameters, wire.password_authorisation()
        )
        return handle, answer.read_sized(2, 1024)

    @contextmanager
    def policy_session(self) -> Iterator[int]:
        """Open a policy session; it is removed at the end."""
        session, _ = self.make_object(TpmCommand.START_AUTH_SESSION, wire.SESSION_HANDLES, wire.policy_session())
        try:
            yield session
        finally:
            self.flush_object(session)

    def read_pcrs(self, indexes: Iterable[int]) -> dict[int, bytes]:
        """Return values of the SHA-256 bank by number, in the order of their numbers."""
        numbers = sorted(set(indexes))
        values: dict[int, bytes] = {}
        for start in range(0, len(numbers), _PCRS_AT_ONCE):
            some = numbers[start : start + _PCRS_AT_ONCE]
            answer = self.send_command(TpmCommand.PCR_READ, (), wire.pcr_selection(some))
            answer.take_bytes(4)
            selected = answer.take_bytes(len(wire.pcr_selection(some)))
            if selected != wire.pcr_selection(some) or answer.read_unsigned(4) != len(some):
                raise TpmError(f"TPM: has not all of the PCRs {some} in a SHA-256 bank")
            values |= {index: answer.read_sized(2, 32) for index in some}
        return values

    def extend_pcr(self, index: int, digest: bytes) -> None:
        """Extend a PCR of the SHA-256 bank by 32 bytes."""
        parameters = struct.pack(">IH", 1, wire.SHA256) + digest
        self.send_command(TpmCommand.PCR_EXTEND, (index,), parameters, wire.password_authorisation())

    def read_memory(self, index: int) -> bytes:
        """Return what lies at an index of the non-volatile memory, such as the EK's certificate."""
        public = self.send_command(TpmCommand.NV_READ_PUBLIC, (index,), b"").read_sized(2, 512)
        size, data = int.from_bytes(public[-2:], "big"), b""
        while len(data) < size:
            part = struct.pack(">HH", min(_NV_BYTES_AT_ONCE, size - len(data)), len(data))
            data += self.send_command(
                TpmCommand.NV_READ, (wire.OWNER, index), part, wire.password_authorisation()
            ).read_sized(2, size)
        return data

    def close(self) -> None:
        self._link.close()

    def _run_command(
        self,
        code: TpmCommand,
        handles: Sequence[int],
        parameters: bytes,
        sessions: Sequence[bytes],
        *,
        with_handle: bool,
    ) -> tuple[int, TpmResponse]:
        command = wire.encode_command(code, handles, sessions, parameters)
        for pause_s in _PAUSES_S:
            try:
                return wire.decode_response(code, self._link.exchange_command(command), with_handle=with_handle)
            except TpmError as exc:
                if exc.response not in _TRY_AGAIN:
                    raise
                time.sleep(pause_s)
        return wire.decode_response(code, self._link.exchange_command(command), with_handle=with_handle)


def open_tpm(address: str = DEFAULT_ADDRESS) -> TpmDevice:
    """Connect to a TPM; the form of addresses is that of `phalanx.security.tee.tpm.link`."""
    return TpmDevice(open_link(address))
