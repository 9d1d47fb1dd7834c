"""A run of one domain as an engine starts it: when a rank dies or hangs, all begin again from the last checkpoint."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from phalanx.checkpoint import list_checkpoints
from phalanx.child import PARENT
from phalanx.errors import ConfigError
from phalanx.launch.request import Launch
from phalanx.parallel import ParallelConfig, list_world_sizes
from phalanx.train import DomainRun, RunConfig, check_directory, default_directory, holds_run, load_run

GO_ON = "PHALANX_GO_ON"
"""Set for ranks that are to go on with the run in the directory if there is one."""
_RANK, _STARTED_AGAIN = "RANK", "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True)
class DomainLaunch:
    """A run file with ``[parallel]`` and how its ranks are to be started.

    Attributes:
        run_file: The file that ``phalanx train`` takes.
        overrides: ``section.key=value`` strings.
        directory: The run directory; None for ``runs/NAME``.
        resume: Go on with the run in the directory, if there is one.
        max_restarts: Maximum of restarts of all ranks; the run file's when None.
        ranks: Number of ranks where the run file allows several; its own when None.
    """

    run_file: Path
    overrides: tuple[str, ...] = ()
    directory: Path | None = None
    resume: bool = False
    max_restarts: int | None = None
    ranks: int | None = None

    @cached_property
    def run_config(self) -> RunConfig:
        """The run."""
        return load_run(self.run_file, self.overrides)

    @property
    def parallel_config(self) -> ParallelConfig:
        """The section of the run file."""
        if not isinstance(self.run_config, DomainRun):
            raise ConfigError(f"{self.run_file}: the section [parallel] is missing")
        return self.run_config.parallel

    @property
    def run_dir(self) -> Path:
        """Where rank 0 writes."""
        return default_directory(self.run_config) if self.directory is None else self.directory

    @property
    def restart_limit(self) -> int:
        """How often all ranks may be started again."""
        return self.parallel_config.restarts if self.max_restarts is None else self.max_restarts

    @property
    def rank_count(self) -> int:
        """How many ranks are started where nothing else decides."""
        return self.parallel_config.num_ranks if self.ranks is None else self.ranks

    def allowed_sizes(self) -> list[int]:
        """Numbers of ranks that the run file allows and that cut its batch into equal shares, most first."""
        train = self.run_config.train
        return list_world_sizes(self.parallel_config, train.batch_size, train.microbatches)

    def newest_checkpoint(self) -> int:
        """Step of the newest checkpoint; 0 when there is none."""
        return max(list_checkpoints(self.run_dir / "checkpoints"), default=0)

    def check_launch(self) -> None:
        """Refuse before anything is started."""
        if not self.resume:
            check_directory(self.run_dir, resume=False)

    def train_arguments(self) -> tuple[str, ...]:
        """The command line of ``phalanx train`` for any of the ranks, after the verb."""
        overrides = (word for override in self.overrides for word in ("--set", override))
        return (str(self.run_file), *overrides, "--run-dir", str(self.run_dir))


def as_domain(launch: Launch) -> DomainLaunch | None:
    """What is to be launched, where its run file has ``[parallel]``; None where it has parties."""
    if not isinstance(load_run(launch.run_file, launch.overrides), DomainRun):
        return None
    for option, value in (("--party", launch.chosen), ("--owner", launch.owner), ("--advertise", launch.advertise)):
        if value:
            raise ConfigError(f"{option} needs a run with [pipeline], not [parallel]; remove it")
    return DomainLaunch(
        launch.run_file, launch.overrides, launch.directory, resume=launch.resume, max_restarts=launch.max_restarts
    )


def is_supervised_here(run: RunConfig, environment: Mapping[str, str]) -> bool:
    """Whether ``phalanx train`` supervises this run's rank 0: no engine started it, and it may be started again."""
    return isinstance(run, DomainRun) and run.parallel.restarts > 0 and not {_RANK, PARENT} & set(environment)


def resumes_run(run_dir: Path, environment: Mapping[str, str]) -> bool:
    """Whether a rank that an engine has started goes on with the run in the directory, without being told to."""
    started_again = int(environment.get(_STARTED_AGAIN, "0")) > 0
    return _RANK in environment and (started_again or GO_ON in environment) and holds_run(run_dir)


def count_returns(run_dir: Path, step: int) -> int:
    """Count how often the run in a directory has gone back to a step's checkpoint by ``--from-step``."""
    log, entry = run_dir / "events.jsonl", f'{{"body":{{"step":{step}}},"kind":"older_accepted"'.encode()
    if not log.exists():
        return 0
    with log.open("rb") as file:
        return sum(line.startswith(entry) for line in file)


def find_open_return(run_dir: Path, step: int | None, environment: Mapping[str, str]) -> int | None:
    """Return the step of ``--from-step``; None where torchrun repeats the option to a run that has gone back to it."""
    started_again = int(environment.get(_STARTED_AGAIN, "0")) > 0
    return None if step is None or (started_again and count_returns(run_dir, step)) else step


class StartSizes:
    """The number of ranks of the next start: as many as before, and fewer when that came to nothing twice.

    A rank that dies once may come back. One that dies again before anything was saved, as on a broken device, would do
    so for ever.

    Args:
        allowed: Numbers of ranks, most first.
        first: Number of ranks of the first start; need not be among the sizes.
    """

    def __init__(self, allowed: list[int], first: int) -> None:
        self._smaller = [size for size in allowed if size < first]
        self._now = first
        self._newest: int | None = None
        self._fruitless = 0

    def next_size(self, newest: int) -> int:
        """Number of ranks of the next start; `newest` is the step of the newest checkpoint."""
        if self._newest is not None:
            self._fruitless = self._fruitless + 1 if newest == self._newest else 0
        self._newest = newest
        if self._fruitless > 1 and self._smaller:
            self._now, self._fruitless = self._smaller.pop(0), 0
        return self._now


def rank_environment(go_on: bool) -> dict[str, str]:
    """Return the environment that tells ranks that their engine will start them again."""
    return {GO_ON: "1"} if go_on else {}


def threads_environment(run: RunConfig) -> dict[str, str]:
    """Threads of tensor kernels, as ``phalanx train`` gives them to its own ranks."""
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(run.train.threads))}
