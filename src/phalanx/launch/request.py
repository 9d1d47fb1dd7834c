"""A request to launch: a run file, and which of its parties run on this machine."""

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from phalanx.config import digest_config
from phalanx.errors import ConfigError
from phalanx.pipeline import OWNER, WorkerConfig
from phalanx.train import DomainRun, FederatedRun, PipelineRun, SplitRun, check_directory, default_directory, load_run

_RESTARTS = 3
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ProcessSlot:
    """One process that an engine keeps running: its party at first, and the names under which it may be replaced.

    Attributes:
        substitutes: Names of `pipeline.may_join` for a process that takes the place of one that died.
    """

    name: str
    substitutes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """A run file and how its processes are to be started.

    Attributes:
        run_file: The file that ``phalanx train`` takes.
        overrides: ``section.key=value`` strings.
        directory: The run directory; None for ``runs/NAME``.
        chosen: Parties that run here; empty for all that have their keys here.
        owner: ``host:port`` of an owner that is started elsewhere; None when it is part of this launch.
        advertise: Name or address of this machine for others; its own name when None.
        resume: Go on with the run in the directory, if there is one.
        max_restarts: Maximum of restarts of everything, or of the owner; 3 when None.
    """

    run_file: Path
    overrides: tuple[str, ...] = ()
    directory: Path | None = None
    chosen: tuple[str, ...] = ()
    owner: str | None = None
    advertise: str | None = None
    resume: bool = False
    max_restarts: int | None = None

    @cached_property
    def run_config(self) -> PipelineRun:
        """The run with its parties named: local workers become parties with certificates of their own."""
        run = self._loaded(self.overrides)
        run.require_steps("phalanx launch, whose parties pin the run in advance,")
        if run.pipeline.pki is None:
            names = " ".join((OWNER, *run.pipeline.worker_names, *run.pipeline.late_workers))
            raise ConfigError(
                f"{self.run_file}: pipeline.pki is missing, but every party needs keys before the launch; run "
                f"`phalanx pki init keys`, `phalanx pki issue keys NAME` for each of {names}, and add --set "
                "pipeline.pki=keys"
            )
        return self._loaded(self.settled_overrides)

    def _loaded(self, overrides: tuple[str, ...]) -> PipelineRun:
        match load_run(self.run_file, overrides):
            case PipelineRun() as run:
                return run
            case SplitRun():
                reason = "[split] is not launched: `phalanx train` starts its enclave itself"
            case FederatedRun():
                reason = "[federated] is not launched: `phalanx train` starts its sites itself"
            case DomainRun():
                reason = "[parallel] has ranks, which are launched as a domain"
        raise ConfigError(f"{self.run_file}: {reason}")

    @cached_property
    def settled_overrides(self) -> tuple[str, ...]:
        """Overrides under which ``phalanx train`` waits for these parties instead of starting its own."""
        pipeline = self._loaded(self.overrides).pipeline
        if pipeline.remote_workers:
            return self.overrides
        return (
            *self.overrides,
            f"pipeline.remote_workers={json.dumps(pipeline.worker_names)}",
            f"pipeline.may_join={json.dumps(pipeline.late_workers)}",
            "pipeline.respawns=0",
            "pipeline.spares=0",
        )

    @property
    def restart_limit(self) -> int:
        """How often the engine may start everything, or the owner, again."""
        return _RESTARTS if self.max_restarts is None else self.max_restarts

    @property
    def run_dir(self) -> Path:
        """Where the owner writes."""
        return default_directory(self.run_config) if self.directory is None else self.directory

    @property
    def keys_directory(self) -> Path:
        """Directory of the parties' keys on this machine."""
        return Path(self.run_config.pipeline.pki or "")

    @property
    def is_on_loopback(self) -> bool:
        """Whether the run's parties are heard on their own machine only."""
        return self.run_config.pipeline.transport.bind in _LOOPBACK

    @cached_property
    def process_slots(self) -> tuple[ProcessSlot, ...]:
        """Return the processes that run here: the chosen parties, or those with keys here; the owner first."""
        pipeline = self.run_config.pipeline
        known_parties = (OWNER, *pipeline.remote_workers, *pipeline.may_join)
        strangers = sorted(set(self.chosen) - set(known_parties))
        if strangers:
            raise ConfigError(f"--party {strangers[0]}: choices of {self.run_file}: {', '.join(known_parties)}")
        with_keys = [name for name in known_parties if (self.keys_directory / name / "signing.key").exists()]
        here = [name for name in known_parties if name in self.chosen] or with_keys
        missing = [name for name in here if name not in with_keys]
        if missing or not here:
            lacking = missing or list(known_parties)
            raise ConfigError(
                f"{self.keys_directory}: lacks the keys of {', '.join(lacking)}; make them here with `phalanx pki "
                "issue`, or have each party make its own with `phalanx pki request`"
            )
        return _deal_substitutes(here, pipeline.may_join)

    @property
    def has_owner(self) -> bool:
        """Whether the owner runs here."""
        return self.process_slots[0].name == OWNER

    def check_request(self) -> None:
        """Refuse before anything is started."""
        if self.has_owner and not self.resume:
            check_directory(self.run_dir, resume=False)
        if self.has_owner and self.owner is not None:
            raise ConfigError(f"--owner {self.owner}: the owner runs here; remove it, or choose others with --party")

    def worker_config(self, name: str, owner: str) -> WorkerConfig:
        """The file of one worker, which will serve this run and no other."""
        run = self.run_config
        return WorkerConfig(
            identity=str((self.keys_directory / name).resolve()),
            owner=owner,
            advertise=self.advertise,
            run_digest=digest_config(run),
            threads=run.train.threads,
            device=run.train.device,
            # the port of the run file is the owner's
            transport=run.pipeline.transport.model_copy(update={"port": 0}),
        )

    def launch_arguments(self) -> tuple[str, ...]:
        """The command line that says the same as this, after the verb."""
        arguments = [str(self.run_file)]
        arguments += [word for override in self.overrides for word in ("--set", override)]
        arguments += [word for name in self.chosen for word in ("--party", name)]
        arguments += ["--run-dir", str(self.run_dir)]
        arguments += [] if self.owner is None else ["--owner", self.owner]
        arguments += [] if self.advertise is None else ["--advertise", self.advertise]
        return (*arguments, "--resume") if self.resume else tuple(arguments)


def reachable_host(bind: str, machine: str | None) -> str | None:
    """What to call a machine that listens on all interfaces; None where the address that it listens on will do.

    Args:
        machine: The engine's name for this machine; its own name when None.
    """
    return (machine or socket.getfqdn()) if bind.strip("[]") in _EVERYWHERE else None


def _deal_substitutes(here: Sequence[str], late: Sequence[str]) -> tuple[ProcessSlot, ...]:
    """Deal the parties that may join later to the workers here as substitutes; without workers each is one itself."""
    workers = [name for name in here if name != OWNER and name not in late]
    if not workers:
        return tuple(ProcessSlot(name) for name in here)
    waiting = [name for name in here if name in late]
    owner = (ProcessSlot(OWNER),) if OWNER in here else ()
    return (*owner, *(ProcessSlot(name, tuple(waiting[n :: len(workers)])) for n, name in enumerate(workers)))
