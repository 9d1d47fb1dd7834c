"""The search: trials in turn or side by side, the best of them trained again, and a winner by those runs alone."""

import json
import math
import statistics
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError, DiskError, PhalanxError, is_disk_fault
from phalanx.evaluate.intervals import difference_by_chance
from phalanx.sweep.config import SweepConfig, TrialRun, Value
from phalanx.sweep.journal import SweepJournal, Trial, open_journal
from phalanx.sweep.sampler import choose_values, is_hopeless
from phalanx.sweep.trial import Trials
from phalanx.train.batches.scores import ValidationResult

RESULT = "sweep.json"
Job = Callable[[], None]


@dataclass(frozen=True)
class SweepResult:
    """The result of a search.

    Attributes:
        winner: Number of the trial with the lowest mean loss of the runs that trained it again; None without any.
        lead: Distance of the next one in nats a token; None without one.
        noise: Lead that chance alone exceeds in one of twenty cases, by the spread over seeds; None with one seed.
    """

    trials: tuple[Trial, ...]
    winner: int | None
    lead: float | None
    noise: float | None
    num_steps: int

    @property
    def winning_values(self) -> dict[str, Value]:
        """The winner's values; empty without one."""
        return {} if self.winner is None else self.trials[self.winner].values

    def describe_winner(self) -> str:
        """Say in one sentence what won, and by how much."""
        if self.winner is None:
            return "no trial was trained to its end; see the reasons above, and widen the space"
        values = " ".join(f"--set {key}={json.dumps(value)}" for key, value in self.winning_values.items())
        sentence = f"trial {self.winner} wins: {values}"
        if self.lead is None:
            return f"{sentence}; no other trial was trained again"
        spread = "unknown with one seed" if self.noise is None else f"{self.noise:.3g}"
        is_clear = self.noise is not None and self.lead > self.noise
        return f"{sentence}; the next is {self.lead:.3g} nats worse, noise {spread}" + ("" if is_clear else ": a tie")

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data; a loss that is no number is null."""
        rows = [asdict(trial) for trial in self.trials]
        for row in rows:
            for name in ("reports", "again"):
                row[name] = {str(key): loss if math.isfinite(loss) else None for key, loss in row[name].items()}
        facts = {"winner": self.winner, "values": self.winning_values, "lead": self.lead, "noise": self.noise}
        return {**facts, "steps": self.num_steps, "trials": rows}


class Sweep:
    """One search in one directory; each trial has a directory in it, by its number."""

    def __init__(self, sweep: SweepConfig, directory: Path, trials: Trials, say: Callable[[str], None]) -> None:
        self._sweep = sweep
        self._directory = directory
        self._trials = trials
        self._say = say

    def run_search(self, *, resume: bool = False) -> SweepResult:
        """Search to the end.

        Raises:
            ConfigError: The directory has a search already, or another process searches there.
            KeyboardInterrupt: The user stopped it; a resumed search loses no trial.
        """
        with open_journal(self._directory, self._sweep, resume=resume) as journal:
            claimed: set[int] = set()
            self._run_jobs(lambda: self._next_trial(journal, claimed))
            result = self._measure_best(journal)
        path = self._directory / RESULT
        spare = path.with_suffix(".tmp")
        spare.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
        spare.replace(path)
        return result

    def _run_jobs(self, next_job: Callable[[], Job | None]) -> None:
        """Do all jobs, as many at once as the sweep file says; after an error none is begun."""
        if self._sweep.jobs == 1:
            while (job := next_job()) is not None:
                job()
            return
        is_over = threading.Event()

        def do_jobs() -> None:
            while not is_over.is_set() and (job := next_job()) is not None:
                job()

        with ThreadPoolExecutor(self._sweep.jobs) as pool:
            threads = [pool.submit(do_jobs) for _ in range(self._sweep.jobs)]
            try:
                for thread in as_completed(threads):
                    thread.result()
            except BaseException:
                is_over.set()
                self._trials.end_trials()
                raise

    def _next_trial(self, journal: SweepJournal, claimed: set[int]) -> Job | None:
        """A trial that was under way, or a new one; None where trials or steps are used up."""
        with journal.lock:
            trials, sweep = journal.trials, self._sweep
            running = [trial for trial in trials if trial.state == "running"]
            waiting = [trial for trial in running if trial.number not in claimed]
            if not waiting:
                if len(trials) >= sweep.num_trials:
                    return None
                longest, again = sweep.bound_steps()
                steps = journal.num_steps + longest * (len(running) + 1) + again
                if sweep.max_steps is not None and steps > sweep.max_steps:
                    return None
                # a trial under way counts as a bad one, so that its neighbours are not tried at the same time
                journal.append_line("begun", number=len(trials), values=choose_values(sweep, trials))
                waiting = trials[-1:]
            claimed.add(waiting[0].number)
            return partial(self._run_trial, journal, waiting[0])

    def _run_trial(self, journal: SweepJournal, trial: Trial) -> None:
        """Train one trial to its end, or as far as it is worth, and measure it."""
        try:
            run = self._sweep.make_run(trial.values)
            excess = self._trials.find_excess(run, self._sweep.max_memory_mib)
        except ConfigError as exc:
            excess = str(exc)
        if excess is not None:
            self._end_trial(journal, trial, "refused", excess, steps=0)
            return
        try:
            if self._is_cut(journal, trial, run, max(trial.reports, default=0)) or self._train_pruned(
                journal, trial, run
            ):
                steps = max(trial.reports)
                self._end_trial(journal, trial, "pruned", f"after {steps} steps", steps=steps)
                return
            loss = self._trials.measure_loss(run, self._trial_directory(trial.number), self._sweep.on)
        except PhalanxError as exc:
            # the loss was no number, or the directory is not what the trial left
            _raise_unjudged(exc)
            self._end_trial(journal, trial, "failed", str(exc), steps=run.train.steps)
            return
        if math.isfinite(loss):
            self._end_trial(journal, trial, "completed", "", steps=run.train.steps, loss=loss)
        else:
            self._end_trial(journal, trial, "failed", "the loss is no number", steps=run.train.steps)

    def _train_pruned(self, journal: SweepJournal, trial: Trial, run: TrialRun) -> bool:
        """Train a trial; return whether it was cut short."""
        is_cut = False

        def note_validation(num_steps: int, result: ValidationResult) -> None:
            nonlocal is_cut
            loss = result.loss_on(self._sweep.on)
            if num_steps not in trial.reports:
                shown = loss if math.isfinite(loss) else None
                journal.append_line("report", number=trial.number, step=num_steps, loss=shown)
            if self._is_cut(journal, trial, run, num_steps):
                is_cut = True
                raise KeyboardInterrupt

        self._train_run(run, self._trial_directory(trial.number), note_validation, lambda: is_cut)
        return is_cut

    def _is_cut(self, journal: SweepJournal, trial: Trial, run: TrialRun, num_steps: int) -> bool:
        """Whether the pruner ends a trial after so many steps; a trial with all of its steps is measured."""
        with journal.lock:
            ended = [other for other in journal.trials if other.state != "running"]
            return num_steps < run.train.steps and is_hopeless(self._sweep, ended, trial, num_steps)

    def _train_run(
        self,
        run: TrialRun,
        directory: Path,
        note: Callable[[int, ValidationResult], None],
        is_cut: Callable[[], bool] = lambda: False,
    ) -> None:
        status = self._trials.train_trial(run, directory, note)
        if status != "completed" and not is_cut():
            # the run has caught what the user sent; it may be resumed
            raise KeyboardInterrupt

    def _end_trial(
        self, journal: SweepJournal, trial: Trial, state: str, reason: str, *, steps: int, loss: float | None = None
    ) -> None:
        journal.append_line("ended", number=trial.number, state=state, reason=reason, steps=steps, loss=loss)
        values = ", ".join(f"{key} = {_short(value)}" for key, value in trial.values.items())
        outcome = f"loss {loss:.4f}" if loss is not None else f"{state}: {reason}"
        self._say(f"trial {trial.number}: {values}: {outcome}")

    def _measure_best(self, journal: SweepJournal) -> SweepResult:
        """Train the best trials again and name the winner by those runs alone: no trial wins by one lucky figure."""
        rule = self._sweep.again
        ranked = sorted((trial.loss, trial.number) for trial in journal.trials if trial.loss is not None)
        best = [journal.trials[number] for _, number in ranked[: rule.best]]
        missing = [(trial, seed) for trial in best for seed in rule.seeds if seed not in trial.again]
        # an iterator of a list gives each of its members to one thread
        jobs = iter([partial(self._train_again, journal, trial, seed) for trial, seed in missing])
        self._run_jobs(lambda: next(jobs, None))
        means = sorted((statistics.fmean(trial.again[seed] for seed in rule.seeds), trial.number) for trial in best)
        winner = means[0][1] if means and math.isfinite(means[0][0]) else None
        lead = noise = None
        if winner is not None and len(means) > 1 and math.isfinite(means[1][0]):
            lead = means[1][0] - means[0][0]
            two_best = [journal.trials[number].again for _, number in means[:2]]
            noise = difference_by_chance([[losses[seed] for seed in rule.seeds] for losses in two_best])
        return SweepResult(tuple(journal.trials), winner, lead, noise, journal.num_steps)

    def _train_again(self, journal: SweepJournal, trial: Trial, seed: int) -> None:
        run = self._sweep.make_run(trial.values, seed)
        directory = self._directory / f"{trial.number:04d}-seed-{seed}"
        try:
            self._train_run(run, directory, lambda _steps, _result: None)
            loss = self._trials.measure_loss(run, directory, self._sweep.again.on or self._sweep.on)
        except PhalanxError as exc:
            _raise_unjudged(exc)
            self._say(f"trial {trial.number} again, seed {seed}: failed: {exc}")
            loss = math.inf
        shown = loss if math.isfinite(loss) else None
        journal.append_line("again", number=trial.number, seed=seed, loss=shown, steps=run.train.steps)
        self._say(f"trial {trial.number} again, seed {seed}: loss {loss:.4f}, in the search {trial.loss:.4f}")

    def _trial_directory(self, number: int) -> Path:
        return self._directory / f"{number:04d}"


def _raise_unjudged(exc: PhalanxError) -> None:
    """Raise the error of a full disk or a killed process, no verdict on the trial: a resumed search runs it again."""
    cause = exc.__cause__
    is_full = isinstance(exc, DiskError) or (isinstance(cause, OSError) and is_disk_fault(cause))
    if is_full or isinstance(cause, EOFError):
        raise exc


def _short(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
