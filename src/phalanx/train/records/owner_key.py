"""The owner's public key, as a run's readers take it from a certificate; apart, because it is read before torch is."""

from pathlib import Path

from phalanx.errors import CertificateError
from phalanx.security.crypto import Peer, certificate_facts


def owner_of(path: Path) -> Peer:
    """Read the party of a certificate; its dates are not judged."""
    try:
        facts = certificate_facts(path.read_bytes(), str(path))
    except OSError as exc:
        raise CertificateError(f"{path}: cannot be read ({exc.strerror}); give --certificate FILE").with_facts(
            file=str(path),
            key="--certificate",
            found=exc.strerror or "",
            expected="the owner's certificate",
            do="give --certificate FILE",
        ) from exc
    # the dates are not judged: a log must stay readable long after its signer's certificate has ended
    if facts.peer is None:
        raise CertificateError(f"{path}: is an authority's certificate, expected the owner's")
    return facts.peer
