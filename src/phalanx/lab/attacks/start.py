"""The start of attackers on this machine: the laboratory's worker in the place of the production one."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field

from phalanx.config import StrictModel, dump_toml
from phalanx.lab.attacks.table import check_attack, load_attack
from phalanx.pipeline import AttackConfig, LocalWorkers
from phalanx.pipeline.processes.fork_server_client import ForkServer
from phalanx.pipeline.processes.local_workers import WORKER_COMMAND
from phalanx.train.records.run_directory import ATTACK_LOG
from phalanx.train.sessions.cluster import OpenWorkers

_MODULE = "phalanx.lab.attacks.worker"
_PLAN_FILE = "attack.toml"


class AttackPlan(StrictModel):
    """The parties of a run that lie, and how; the file of ``python -m phalanx.lab.attacks.worker``."""

    attackers: dict[str, AttackConfig]
    """By name; a party that is not here cannot be started with this file."""
    ranks: dict[str, int] = Field(default_factory=dict)
    """Of parties of several ranks, which one does the lying; left out, rank 0, which speaks for its party."""
    log: str | None = None
    """File in which attackers record their lies."""
    home: str | None = None
    """Directory of the files of attacks that are the user's own; left out, that of this file."""


def attackers_of(
    attack: AttackConfig,
    fork_server: ForkServer | None = None,
    *,
    home: Path = Path(),
    launchers: Mapping[str, Sequence[str]] | None = None,
) -> OpenWorkers:
    """What starts the local workers of a run in which some attack; all others are the production process.

    Args:
        launchers: By worker, module and arguments of what starts its command, which is added to them.
    """
    load_attack(attack, home)
    check_attack(attack)
    liars = {
        f"worker-{stage}": attacker.model_copy(update={"also": ()})
        for attacker in attack.single_attacks
        for stage in attacker.stages
    }

    def open_workers(directory: Path) -> LocalWorkers:
        directory.mkdir(parents=True, exist_ok=True)
        plan, log = (directory / _PLAN_FILE).resolve(), directory.with_name(ATTACK_LOG).resolve()
        plan.write_text(
            dump_toml(AttackPlan(attackers=liars, log=str(log), home=str(home.resolve()))), encoding="utf-8"
        )
        others = {name: (*launcher, *WORKER_COMMAND) for name, launcher in (launchers or {}).items()}
        others |= {name: (*(launchers or {}).get(name, ()), _MODULE, str(plan)) for name in liars}
        return LocalWorkers(directory, others=others, fork_server=fork_server)

    return open_workers
