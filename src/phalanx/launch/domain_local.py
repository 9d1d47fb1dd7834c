"""``phalanx train`` on this machine: it starts rank 0, which starts the others, and starts all again after a loss."""

import time
from pathlib import Path

from phalanx.launch.child import Child, TerminationNotice, exit_code
from phalanx.launch.domain import DomainLaunch, StartSizes, count_returns
from phalanx.launch.worker_slot import watch_owner
from phalanx.parallel.groups.heartbeat import FileHeartbeat, SilenceClock
from phalanx.train import check_directory, holds_run

_NOBODY = -1


class LeadProcess(Child):
    """Rank 0 as a process of its own: what kills it, or lets it hang, does not end the run.

    Args:
        from_step: Step as in `phalanx.train`: asked for until the run has gone back to it, once.
        from_run: Run as in `phalanx.train`: asked for until there is a run to go on with.
    """

    def __init__(self, launch: DomainLaunch, from_step: int | None = None, from_run: Path | None = None) -> None:
        super().__init__()
        self._launch = launch
        self._from_step, self._from_run = from_step, from_run
        self._num_returns = 0 if from_step is None else count_returns(launch.run_dir, from_step)
        self._has_begun = False
        self._sizes = StartSizes(launch.allowed_sizes(), launch.rank_count)
        self._heartbeat = FileHeartbeat(launch.run_dir / "ranks", _NOBODY, range(1))
        self._patience = SilenceClock(launch.parallel_config.silence_s, time.monotonic())

    @property
    def listen_address(self) -> str | None:
        """None: rank 0 listens for no workers."""
        return None

    def start_process(self) -> None:
        """Start it; heartbeats of an earlier one are forgotten first."""
        self._heartbeat.remove_files()
        launch, step = self._launch, self._from_step
        goes_on = self._has_begun and holds_run(launch.run_dir)
        arguments: tuple[str, ...] = ("--resume",) if goes_on or launch.resume else ()
        if step is not None and count_returns(launch.run_dir, step) == self._num_returns:
            arguments += ("--from-step", str(step))
        if self._from_run is not None and not goes_on:
            arguments += ("--from", str(self._from_run))
        self._has_begun = True
        ranks = ("--ranks", str(self._sizes.next_size(launch.newest_checkpoint())))
        self.start_command(("train", *launch.train_arguments(), *arguments, *ranks), {})

    def look_for_signs(self) -> None:
        """Kill it when it hangs; `watch_owner` notices its end."""
        now = time.monotonic()
        self._patience.note_counts(self._heartbeat.read_counts(), now)
        if self._patience.overdue_ranks(now):
            self.kill()


def supervise_domain(launch: DomainLaunch, *, from_step: int | None = None, from_run: Path | None = None) -> int:
    """Run rank 0 until the run is over, however often it has to be started.

    Args:
        from_step: Step as in `phalanx.train`.
        from_run: Run as in `phalanx.train`.
    """
    # before anything is started or removed there
    check_directory(launch.run_dir, resume=launch.resume)
    lead = LeadProcess(launch, from_step, from_run)
    with TerminationNotice() as notice:
        try:
            code = watch_owner(
                lead, notice, lambda _: lead.look_for_signs(), restarts=launch.restart_limit, name="rank 0"
            )
        finally:
            lead.kill()
    return exit_code(code)
