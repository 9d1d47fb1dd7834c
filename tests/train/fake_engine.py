"""An engine without a model, for sessions that are told what every validation says."""

import contextlib
from types import SimpleNamespace

import torch

from phalanx.checkpoint import Shard
from phalanx.data import Batch
from phalanx.engine import StepResult
from phalanx.train.saving.saver import PlainSaver
from phalanx.train.sessions.factory import RunMaterial


class CountingLoader:
    """Gives batches of one number, which is where it is."""

    corpus_digest = "c0" * 32

    def __init__(self):
        self.number = 0

    def next_batch(self):
        self.number += 1
        ids = torch.full((8, 16), self.number)
        return Batch(ids, ids, tuple(range(8)))

    def position_state(self):
        return {"number": self.number}

    def load_position(self, state):
        self.number = state["number"]


class FakeEngine:
    """An engine without a model: factory, setup and running engine in one; fails and measures as told.

    Its held-out perplexity after so many steps is what `perplexities` has for that number, else 3.
    """

    def __init__(self, failures=(), perplexities=(), named=()):
        self.failures = dict(failures)
        self.perplexities = dict(perplexities)
        self.named = tuple(named)
        self.start = 0
        self.asked = []
        self.seen = []
        self.engine = self.trained_model = self

    @contextlib.contextmanager
    def prepare_setup(self, context):
        self.context = context
        self.material = RunMaterial(
            SimpleNamespace(),
            SimpleNamespace(num_validation_sequences=1, validation_batch=None),
            CountingLoader(),
            {name: SimpleNamespace(num_validation_sequences=0, validation_batch=None) for name in self.named},
        )
        yield self
        self.asked.append("sent home")

    def recover_state(self, savepoint):
        self.asked.append("recover")

    @contextlib.contextmanager
    def open_engine(self, opening):
        self.asked.append(f"open at {opening.start}")
        self.opening = opening
        self.start = opening.start
        self.context.log_opening(opening.recorder, opening.start, self.material.loader, {"kind_of_engine": "fake"})
        self.saver = PlainSaver(
            lambda: iter([Shard(0, {"weight/x": torch.zeros(2)}, len(self.seen))]),
            opening.savepoint,
            self.context.make_observer(opening.recorder),
        )
        yield self

    def train_turn(self, step, inputs):
        if step in self.failures:
            raise self.failures.pop(step)
        self.seen.append((step, int(inputs.ids[0][0, 0])))
        return StepResult(step, 2.0, inputs.num_targets, 1.0, {}, {}, inputs.batch_digest(), None)

    @property
    def num_steps(self):
        return self.seen[-1][0] + 1 if self.seen else self.start

    def measure_sets(self, sets):
        return [self.perplexities.get(self.num_steps, 3.0) + number for number, _ in enumerate(sets)]

    def settle_steps(self):
        self.asked.append("settle")

    def return_to_checkpoint(self, reason):
        opening = self.opening
        return opening.savepoint.rewind_run(opening.savepoint.open_newest(), opening.metrics)

    def record_end(self):
        self.context.figures.final_weights_digest = "00" * 32
        self.opening.recorder.observe_event("run_completed", {"final_weights_digest": "00" * 32})
