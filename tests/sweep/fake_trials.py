"""Trials without a model: a loss that is a formula, told at each validation, and what a poisoned trial would say."""

import json
import math

from phalanx.train.batches.scores import ValidationResult
from tiny_run_file import tiny_run_file

RUN = tiny_run_file("[pipeline]\nstages = 1\n[checkpoint]\nevery = 0\njournal = false\n", steps=9, validate_every=3)
BEST_RATE = 0.02


def write_files(home, *lines, space='"optimizer.lr" = { low = 1e-4, high = 1.0, log = true }'):
    """Write a run file and a sweep file."""
    (home / "run.toml").write_text(RUN)
    text = "\n".join(('run = "run.toml"', *lines, "[space]", space, "[again]", "best = 2", "seeds = [11, 12]"))
    (home / "sweep.toml").write_text(text + "\n")
    return home / "sweep.toml"


class Death(BaseException):
    """The process is gone."""


class FakeTrials:
    """Trials whose loss is a parabola in the logarithm of the rate.

    Args:
        lives: Calls that are answered before the process dies; None lets it live.
        lies: Loss in the summary of a run, by the name of its directory.
        poisoned: Loss of a run's checkpoint, by the name of its directory.
    """

    def __init__(self, lives=None, lies=None, poisoned=None):
        self.lives = lives
        self.poisoned = poisoned or {}
        self.calls = []
        self.lies = lies or {}

    def breathe(self):
        if self.lives is not None:
            self.lives -= 1
            if self.lives < 0:
                raise Death

    def loss_of(self, run):
        return 3.0 + 0.1 * math.log(run.optimizer.lr / BEST_RATE) ** 2 + 1e-4 * run.train.seed

    def find_excess(self, run, max_memory_mib):
        self.breathe()
        too_large = max_memory_mib is not None and run.model.architecture["n_embd"] > max_memory_mib
        return "needs more" if too_large else None

    def train_trial(self, run, directory, on_validation):
        self.calls.append(directory.name)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            for step in range(3, run.train.steps + 1, 3):
                self.breathe()
                loss = self.loss_of(run) + 1.0 / step
                on_validation(step, ValidationResult(math.exp(loss)))
        except KeyboardInterrupt:
            return "interrupted"
        reported = self.lies.get(directory.name, self.loss_of(run))
        (directory / "summary.json").write_text(json.dumps({"validation_perplexity": math.exp(reported)}))
        return "completed"

    def measure_loss(self, run, directory, on):
        self.breathe()
        return self.poisoned.get(directory.name, self.loss_of(run))

    def end_trials(self):
        self.calls.append("ended")


class UnrepeatedTrials(FakeTrials):
    """The defence off: the checkpoint of the search stands for the runs that train a trial again."""

    def measure_loss(self, run, directory, on):
        return super().measure_loss(run, directory.with_name(directory.name[:4]), on)


class TrustingTrials(FakeTrials):
    """The defence off: a trial is worth what its summary says."""

    def measure_loss(self, run, directory, on):
        return math.log(json.loads((directory / "summary.json").read_text())["validation_perplexity"])
