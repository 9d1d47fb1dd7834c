"""Calls at the places where data, checkpoints and evidence are opened: a gate that is in force decides and logs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol


class AccessGate(Protocol):
    """What decides about reads and acts, and writes them down; without one nothing is asked."""

    def note_read(self, kind: str, digest: str | Callable[[], str], where: Path, *, is_sealed: bool) -> None:
        """Write down a read, or refuse it."""

    def require_approvals(self, action: str, target: Callable[[], str], where: Path) -> None:
        """Refuse an act that a second person has not approved."""

    def check_caller(self, call: str, name: str, key: str | None) -> None:
        """Refuse a remote call whose caller lacks the role."""


_GATES: list[AccessGate] = []
"""Those in force in this process; a process that is forked inherits them."""


@contextmanager
def enter_gate(gate: AccessGate) -> Iterator[None]:
    """Within it a gate is asked."""
    _GATES.append(gate)
    try:
        yield
    finally:
        _GATES.remove(gate)


def note_read(kind: str, digest: str | Callable[[], str], where: Path, *, is_sealed: bool = False) -> None:
    """Write down that data, a checkpoint or evidence is read, before a byte of it is handed out.

    Args:
        digest: Of the manifest or file that names the content. Where it must be computed, a function: it is called
            where a gate governs the place, once for a kind and a place.
        is_sealed: Whether the reader decrypts it.

    Raises:
        VerificationError: A gate refuses the read, or its log cannot be continued.
    """
    for gate in list(_GATES):
        gate.note_read(kind, digest, where, is_sealed=is_sealed)


def require_approvals(action: str, target: Callable[[], str], where: Path) -> None:
    """Return when no gate wants a second person for an act, or that person has approved it.

    Args:
        target: Names the target of the act; called only if a gate needs it.

    Raises:
        VerificationError: An approval is missing.
    """
    for gate in list(_GATES):
        gate.require_approvals(action, target, where)


def check_caller(call: str, name: str, key: str | None) -> None:
    """Return when no gate refuses a remote call.

    Args:
        call: Its row in the table of calls, such as ``Deliver``.
        name: Name that the caller has proved: of its certificate, or of the owner of its API key.
        key: Fingerprint of the key of its certificate; None where the caller has none.

    Raises:
        VerificationError: The caller lacks the role.
    """
    for gate in list(_GATES):
        gate.check_caller(call, name, key)
