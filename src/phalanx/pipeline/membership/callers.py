"""The parties that call the owner to join: their announcement to the user, and refusals at once."""

import threading
from collections.abc import Callable, Collection

from phalanx.errors import CertificateError, PeerRefusedError
from phalanx.security.crypto import certified_name

_MAX_LINES = 1000
NameOf = Callable[[str, bool], str | None]


class Callers:
    """The callers of one session; the wire's threads ask it for the name of each.

    Args:
        name_of: Names the present or next incarnation of a certificate.
        expected: Names of the parties that this session lets in.
        revoked: Reads the certificates that the owner has taken back, by the name in each.
        say: Takes one line; called from the wire's threads.

    Guarantees:
        A party is named by its certificate, never by its own words. A revoked one is refused, and every one where the
        list of them cannot be read. Each announcement is made once, and their number is bounded, so that a caller
        cannot fill a terminal.
    """

    def __init__(
        self,
        name_of: NameOf,
        expected: Collection[str],
        say: Callable[[str], None],
        revoked: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._name_of = name_of
        self._expected = frozenset(expected)
        self._revoked = revoked
        self._print_line = say
        self._announced_lines: set[str] = set()
        self._lock = threading.Lock()

    def name_caller(self, certified: str, begins: bool) -> str | None:
        """Return the caller's name in this session; None while an earlier incarnation is still to be shut out.

        Raises:
            PeerRefusedError: It is no party of this session, or may not come back in it.
        """
        try:
            self._check_caller(certified)
            name = self._name_of(certified, begins)
        except PeerRefusedError as exc:
            self._announce_once(f"refused a caller: {exc}")
            raise
        if begins and name is not None:
            self._announce_once(
                f"{name} has called" if name == certified_name(name) else f"{name} has called: it came back"
            )
        return name

    def _check_caller(self, certified: str) -> None:
        try:
            is_revoked = certified in self._revoked()
        except CertificateError as exc:
            raise PeerRefusedError("the list of revocations cannot be read, so no party is admitted") from exc
        if is_revoked:
            raise PeerRefusedError(f"the certificate of {certified} was revoked by the owner")
        if certified not in self._expected:
            raise PeerRefusedError(
                f"{certified} is not a party of this session; pipeline.remote_workers and may_join of the run file "
                "list the parties, and convicted ones stay excluded"
            ).with_facts(code="PHX-T041", found=certified)

    def _announce_once(self, line: str) -> None:
        with self._lock:
            if line in self._announced_lines or len(self._announced_lines) >= _MAX_LINES:
                return
            self._announced_lines.add(line)
        self._print_line(line)
