"""Workers of rollouts as processes of this machine, or elsewhere, behind mutual TLS and signed frames."""

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from phalanx.errors import PeerLostError
from phalanx.rollouts.company import RolloutCompany
from phalanx.rollouts.config import RolloutCheck, RolloutWorkerConfig
from phalanx.rollouts.evidence import EvidenceDirectory
from phalanx.rollouts.judgement import RewardRule
from phalanx.rollouts.share import CheckedShare
from phalanx.security.crypto import Identity
from phalanx.transport import LocalWorkerProcesses, TransportConfig, joined_workers

_COMMAND = ("phalanx", "rollout-worker")


def local_rollout_workers(
    directory: Path,
    identities: Path,
    template: RolloutWorkerConfig,
    others: Mapping[str, Sequence[str]] | None = None,
) -> LocalWorkerProcesses:
    """Return what starts a worker process for each name; see there."""
    return LocalWorkerProcesses(directory, identities, template, _COMMAND, template.threads, others)


@contextlib.contextmanager
def rollout_company(
    identity: Identity,
    names: Sequence[str],
    run: str,
    directory: Path,
    check: RolloutCheck,
    *,
    transport: TransportConfig | None = None,
    processes: LocalWorkerProcesses | None = None,
    reward: RewardRule | None = None,
    announce: Callable[[str], None] = lambda address: None,
    note_absent: Callable[[str, PeerLostError], None] | None = None,
) -> Iterator[RolloutCompany]:
    """Start or await workers, let them write texts, and end them whatever happens.

    Args:
        directory: Directory of the evidence files.
        transport: Address to listen on, deadlines and bounds.
        processes: Starts local ones; left out, workers are started by hand on other machines.
        reward: Reward of a text; needed where workers report rewards.
        announce: Told the address at which workers are awaited.
        note_absent: Told of workers that did not join in time; left out, one that is absent is an error.
    """
    limits, patience_s = transport or TransportConfig(), check.answer_timeout_s
    with joined_workers(
        identity, names, run, limits, processes, announce=announce, patience_s=patience_s, note_absent=note_absent
    ) as joined:
        desk = EvidenceDirectory(directory, joined.session, identity.authority_pem.decode(), joined.certificates)
        share = CheckedShare(secrets.token_bytes(32), check.rate)
        present = [name for name in names if name in joined.certificates]
        company = RolloutCompany(joined.endpoint, present, check, share, desk, reward)
        yield company
        company.close()
