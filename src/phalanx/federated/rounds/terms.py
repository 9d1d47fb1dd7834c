"""The facts of a run that the owner and each site have from their own copies of the run file."""

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.federated.config import FederatedConfig
from phalanx.security.crypto import Peer


@dataclass(frozen=True)
class RunTerms:
    """The facts of a run; no party takes another one's word for them.

    Attributes:
        run: Name of the run.
        digest: Of the run file.
        config: The section.
        seed: Of the draw of cohorts.
        owner: Asks for rounds.
        roster: All sites by name, certified by the run's authority.
    """

    run: str
    digest: str
    config: FederatedConfig
    seed: int
    owner: Peer
    roster: Mapping[str, Peer]
