"""A worker with an ordinary certificate that computes honestly, claims another class, and spoils what it keeps.

Usage: claiming_worker.py WORKER.toml FACTOR FROM_STEP
"""

import functools
import sys
from pathlib import Path

import torch

from phalanx.config import load_config
from phalanx.pipeline import StageCopy, WorkerConfig, run_worker
from phalanx.testing import Actor, RewritingEndpoint


class SpoiltCopy(StageCopy):
    """Takes honest updates, and multiplies its weights after those from a step on."""

    factor, from_step = 1.0, 0

    @torch.no_grad()
    def apply_update(self, step, gradients, clip_coefficient):
        super().apply_update(step, gradients, clip_coefficient)
        if step >= self.from_step:
            for weight in self.trained_tensors().values():
                weight.mul_(self.factor)


def spoilt(copy, held):
    if not held:
        return copy
    # the very copy: module, optimizer and runner stay as they are
    copy.__class__ = SpoiltCopy
    return copy


if __name__ == "__main__":
    file, SpoiltCopy.factor, SpoiltCopy.from_step = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    opener = functools.partial(RewritingEndpoint, actor=Actor(numeric_class="another build"))
    run_worker(load_config(Path(file), WorkerConfig), open_endpoint=opener, wrap_copy=spoilt)
