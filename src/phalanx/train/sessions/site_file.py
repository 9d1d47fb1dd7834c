"""The file of a site of federated rounds: the run that it agrees to, its own keys, and where the owner is."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from phalanx.config import StrictModel, digest
from phalanx.federated.rounds.terms import RunTerms
from phalanx.security.crypto import Identity, peer_from_certificate
from phalanx.train.batches.site_data import section_of
from phalanx.train.config import RunConfig
from phalanx.transport import TransportConfig


class SiteFile(StrictModel):
    """The config of one site's process.

    Attributes:
        run: The run file: the site trains under these terms and no others.
        identity: Directory with its keys and certificate.
        directory: Its own: the book of sums that it has entered, control variates.
        owner: ``host:port`` of the owner.
        owner_certificate: PEM.
        certificates: PEM of all sites by name, which secure sums are checked against.
        cache: Where prepared text and converted models are kept.
        join_timeout_s: How long to look for an owner that does not answer.
        transport: Where the site listens, deadlines and bounds.
    """

    run: str
    identity: str
    directory: str
    owner: str
    owner_certificate: str
    certificates: dict[str, str]
    cache: str
    join_timeout_s: Annotated[float, Field(gt=0.0, le=86400.0)] = 120.0
    transport: TransportConfig = TransportConfig()

    @property
    def own(self) -> Path:
        """The site's directory."""
        return Path(self.directory)


def session_prefix(run: RunConfig) -> str:
    """Return what the names of a run's sessions begin with."""
    return f"{digest(run)[:32]}-"


def terms_of(run: RunConfig, identity: Identity, owner_pem: bytes, certificates: dict[str, str]) -> RunTerms:
    """Return the facts of a run, with parties that its authority has certified.

    Raises:
        ConfigError: The run has no rounds.
        CertificateError: A certificate is not of the authority.
    """
    found = {
        name: peer_from_certificate(pem.encode("ascii"), identity.authority_pem) for name, pem in certificates.items()
    }
    owner = peer_from_certificate(owner_pem, identity.authority_pem)
    return RunTerms(digest(run)[:32], digest(run), section_of(run), run.train.seed, owner, found, run.train.steps)
