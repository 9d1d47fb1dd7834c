"""The rendezvous of one launch: its processes read there where the owner listens, and whether the run is over.

What is written here is no secret and is not trusted: a worker that is sent to a wrong address finds another
certificate there than its owner's.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Protocol

_DIRECTORY = "PHALANX_BOARD"
_ADDRESS, _ENDED = "address", "ended"
_PATIENCE = timedelta(seconds=60)


class Rendezvous(Protocol):
    """A rendezvous that every process of a launch reads, and that the owner's supervisor writes."""

    def read_address(self) -> str | None:
        """Where the owner listens; None while it does not."""

    def has_ended(self) -> bool:
        """Whether the run is over."""

    def publish_address(self, address: str | None) -> None:
        """Say where the owner listens; None when it is gone."""

    def announce_end(self, code: int) -> bool:
        """Say that the run is over, and how its owner ended.

        Returns:
            Whether the process that started this launch will read the exit code here.
        """


class FileRendezvous:
    """A rendezvous in two files of a directory, for processes on one machine."""

    def __init__(self, directory: Path) -> None:
        self._address, self._ended = directory / _ADDRESS, directory / _ENDED

    def read_address(self) -> str | None:
        """Where the owner listens; None while it does not."""
        try:
            return self._address.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def has_ended(self) -> bool:
        """Whether the run is over."""
        return self._ended.exists()

    def read_exit_code(self) -> int:
        """Exit code of the owner; 0 when none was written."""
        return int(self._ended.read_text(encoding="ascii") or 0) if self.has_ended() else 0

    def publish_address(self, address: str | None) -> None:
        """Say where the owner listens; None when it is gone."""
        if address is None:
            self._address.unlink(missing_ok=True)
            return
        temporary = self._address.with_suffix(".tmp")
        temporary.write_text(address, encoding="utf-8")
        temporary.rename(self._address)

    def announce_end(self, code: int) -> bool:
        """Say that the run is over; `run_torchrun` ends with this code."""
        temporary = self._ended.with_suffix(".tmp")
        temporary.write_text(str(code), encoding="ascii")
        temporary.rename(self._ended)
        return True


class StoreRendezvous:
    """A rendezvous in two keys of the store of a torchrun over several machines."""

    def __init__(self, host: str, port: int) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined] # noqa: PLC0415 - rarely needed

        self._store = TCPStore(host, port, is_master=False, timeout=_PATIENCE)

    def read_address(self) -> str | None:
        """Where the owner listens; None while it does not."""
        return self._read_key(_ADDRESS) or None

    def has_ended(self) -> bool:
        """Whether the run is over."""
        return self._read_key(_ENDED) is not None

    def publish_address(self, address: str | None) -> None:
        """Say where the owner listens; None when it is gone."""
        self._store.set(_store_key(_ADDRESS), address or "")

    def announce_end(self, code: int) -> bool:
        """Say that the run is over if it is complete: after a failure the store ends before it can be read."""
        if code == 0:
            self._store.set(_store_key(_ENDED), "1")
        return False

    def _read_key(self, name: str) -> str | None:
        # get() of a key that is not there waits for it
        return str(self._store.get(_store_key(name)), "utf-8") if self._store.check([_store_key(name)]) else None


class FixedRendezvous:
    """A rendezvous for workers with an owner outside this launch: its address is given and nothing else is known."""

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def read_address(self) -> str | None:
        """Where the owner listens."""
        return self._owner

    def has_ended(self) -> bool:
        """False: no process says that the run is over."""
        return False

    def publish_address(self, address: str | None) -> None:
        """Do nothing: no process reads it."""

    def announce_end(self, code: int) -> bool:
        """Do nothing: no process reads it."""
        return False


def rendezvous_environment(directory: Path) -> dict[str, str]:
    """Return the environment that tells processes on this machine to use a directory as their rendezvous."""
    return {_DIRECTORY: str(directory)}


def open_rendezvous(owner: str | None) -> Rendezvous:
    """Return the rendezvous of the launch that this process belongs to."""
    if owner is not None:
        return FixedRendezvous(owner)
    directory = os.environ.get(_DIRECTORY)
    if directory is not None:
        return FileRendezvous(Path(directory))
    return StoreRendezvous(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def _store_key(name: str) -> str:
    return f"phalanx/{name}"
