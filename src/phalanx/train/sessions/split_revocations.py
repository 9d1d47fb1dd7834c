"""Certificates of a split that were taken back: no turn is asked for any more, so nothing is trained."""

from collections.abc import Callable, Collection, Mapping, Sequence

from phalanx.errors import PeerRefusedError
from phalanx.pipeline import Observe, revocation_facts
from phalanx.security.crypto import Revocation


class SplitRevocations:
    """A look before each turn whether every party of the run still has its certificate.

    Args:
        parties: Enclave and clients, by the names in their certificates.
        revoked: Reads the owner's revocations, by name.
        barred: Parties that the log of earlier sessions names as revoked, whatever the list says now.

    Guarantees:
        The enclave trains on turns of the owner alone, so of a revoked party no tensor is taken after the step under
        way. A split waits for all of its parties: one that is revoked ends the run.
    """

    def __init__(
        self,
        parties: Sequence[str],
        revoked: Callable[[], Mapping[str, Revocation]],
        barred: Collection[str],
        observe: Observe,
    ) -> None:
        self._parties, self._revoked, self._observe = tuple(parties), revoked, observe
        self._barred = set(barred)

    def check(self, step: int) -> None:
        """Return where none of them is revoked; before the turn of a step.

        Raises:
            PeerRefusedError: One is; the log has it.
            CertificateError: The list cannot be read, so none is known to be still a party.
        """
        revoked = self._revoked()
        for name in self._parties:
            if name in revoked and name not in self._barred:
                self._observe("revoked", {**revocation_facts(revoked[name]), "step": step})
                self._barred.add(name)
        if gone := [name for name in self._parties if name in self._barred]:
            raise PeerRefusedError(
                f"{', '.join(gone)}: the certificate was revoked, but a split needs all its parties; begin another "
                "run without this party in the run file"
            )
