"""The training initiator of the paper: it starts the parties, takes alarms, and leaves suspects out of a step."""

import math
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from phalanx.child import AskedProcess, Message
from phalanx.closing import Closeable
from phalanx.engine import StepInputs
from phalanx.errors import TrainingError
from phalanx.lab.reproduce.arms.skip_layer import skipped_and_frozen
from phalanx.lab.reproduce.parties.party import OWNER, SERVER, holder_of
from phalanx.lab.reproduce.parties.settings import PaperRun
from phalanx.models import weights_digest
from phalanx.optimizers import clip_coefficient, learning_rate

_MODULE = "phalanx.lab.reproduce.parties.party"


@dataclass
class StepCounts:
    """What has happened so far.

    Attributes:
        alarms: Pairs of stages that an alarm left under suspicion, each with its step.
        honest_accused: Alarms about the work of an honest stage.
        attacked_steps: Steps in which a stage lied.
        missed_steps: Attacked steps without an alarm.
        redone_passes: Forward passes that ran again without the suspects.
    """

    alarms: list[tuple[int, int, int]] = field(default_factory=list)
    honest_accused: int = 0
    attacked_steps: int = 0
    missed_steps: int = 0
    redone_passes: int = 0


class PartyProcesses(Closeable):
    """The processes of the owner, of a worker for each middle stage, and of the server; they play one run at a time.

    Args:
        log: File for the output of all parties.
    """

    def __init__(self, num_stages: int, log: Path) -> None:
        self.num_stages = num_stages
        self.stages: Mapping[str, list[int]] = {
            OWNER: [0, num_stages - 1],
            **{holder_of(stage, num_stages): [stage] for stage in range(1, num_stages - 1)},
            SERVER: [],
        }
        self._processes = {name: AskedProcess([_MODULE], log=log) for name in self.stages}
        self._threads = ThreadPoolExecutor(len(self.stages))

    def ask_each(
        self, orders: Mapping[str, Mapping[str, Any]], contents: Mapping[str, bytes] | None = None
    ) -> dict[str, Message]:
        """Send each party its order at once, and wait for all answers.

        Raises:
            TrainingError: A party has ended; the others are ended too.
        """
        asked: dict[str, Future[Message]] = {
            name: self._threads.submit(self._processes[name].ask, order, (contents or {}).get(name, b""))
            for name, order in orders.items()
        }
        wait(asked.values(), return_when=FIRST_EXCEPTION)
        for name, answer in asked.items():
            if answer.done() and (error := answer.exception()) is not None:
                self.close()
                raise TrainingError(f"{name} has ended: {error}") from error
        return {name: answer.result() for name, answer in asked.items()}

    def close(self) -> None:
        for process in self._processes.values():
            process.close()
        self._threads.shutdown()


class RealParties:
    """A run with a defence of the paper among processes.

    An alarm is read at the end of a pass: the stage whose work was not repeated and the one behind it, which says so,
    are left out, the pass runs again without them, and three stages are frozen in this step (skip layer).

    Args:
        cache: Directory in which the parties find, or make, the model.

    Raises:
        TrainingError: A party has ended.
    """

    def __init__(self, processes: PartyProcesses, paper_run: PaperRun, cache: Path) -> None:
        self._run, self.counts = paper_run.run, StepCounts()
        self._attacker, self._processes = paper_run.make_attacker(), processes
        has_server = paper_run.paper.defence == "central_server"
        self._names = [name for name in processes.stages if name != SERVER or has_server]
        opening = {"do": "open", "run": paper_run.model_dump_json(), "cache": str(cache)}
        answers = processes.ask_each(
            {name: opening | {"name": name, "stages": processes.stages[name]} for name in self._names}
        )
        self._ask_all({"do": "connect", "ports": {name: answer["port"] for name, (answer, _) in answers.items()}})

    def train_step(self, step: int, inputs: StepInputs) -> float:
        """Train one step.

        Returns:
            The mean loss of a token, in nats.

        Raises:
            TrainingError: Another stage lies in the second attempt, to which the paper has no answer.
        """
        liar = self._attacker.lying_stage_at(step)
        loss, suspects = self._run_attempt(step, 0, inputs, frozenset(), frozenset())
        frozen: frozenset[int] = frozenset()
        self.counts.attacked_steps += liar is not None
        if not suspects:
            self.counts.missed_steps += liar is not None
        else:
            suspect = suspects[0]
            self.counts.alarms.append((step, suspect, suspect + 1))
            self.counts.honest_accused += suspect != liar
            self.counts.redone_passes += 1
            self._ask_all({"do": "abandon"})
            bypassed, frozen = skipped_and_frozen(suspect, self._run.pipeline.stages)
            loss, others = self._run_attempt(step, 1, inputs, bypassed, frozen)
            if others:
                raise TrainingError(
                    f"step {step}: stage {others[0]} lies as well as stage {suspect}; skip_layer knows one liar a step"
                )
        self._apply_update(step, frozen)
        return loss

    def weights_digest(self) -> str:
        """SHA-256 over all parameters by name."""
        tensors: dict[str, Tensor] = {}
        for _, content in self._ask_all({"do": "weights"}).values():
            tensors |= safetensors.torch.load(content) if content else {}
        return weights_digest(tensors.items())

    def measure_usage(self) -> dict[str, dict[str, Any]]:
        """Return CPU seconds, sent bytes by kind, and bytes of duplicates, by party, since the start."""
        return {name: answer for name, (answer, _) in self._ask_all({"do": "usage"}).items()}

    def _run_attempt(
        self, step: int, number: int, inputs: StepInputs, bypassed: frozenset[int], frozen: frozenset[int]
    ) -> tuple[float, list[int]]:
        num_stages = self._run.pipeline.stages
        attempt = {
            "step": step,
            "number": number,
            "num_microbatches": len(inputs.ids),
            "num_stages": num_stages,
            "path": [stage for stage in range(num_stages) if stage not in bypassed],
            "idle": sorted(frozen),
        }
        given = {
            "ids": torch.stack(inputs.ids),
            "labels": torch.stack(inputs.labels),
            "targets": torch.tensor(inputs.num_targets),
        }
        order = {"do": "forward", "attempt": attempt}
        forward = self._ask_all(order, {OWNER: safetensors.torch.save(given)})
        loss = forward[OWNER][0]["loss_sum"] / inputs.num_targets
        suspects = _list_suspects(forward)
        if not suspects:
            suspects = _list_suspects(self._ask_all({"do": "backward", "attempt": attempt}))
        return loss, suspects

    def _apply_update(self, step: int, frozen: frozenset[int]) -> None:
        answers = self._ask_all({"do": "norms"})
        squares = {stage: square for answer, _ in answers.values() for stage, square in answer.get("squares", ())}
        taken = [squares[stage] for stage in sorted(squares) if stage not in frozen]
        norm = math.sqrt(math.fsum(taken)) if all(map(math.isfinite, taken)) else math.nan
        optimizer = self._run.optimizer
        update = {
            "do": "update",
            "lr": learning_rate(optimizer, step, self._run.train.steps),
            "clip": clip_coefficient(norm, optimizer.clip_norm),
            "frozen": sorted(frozen),
        }
        self._ask_all(update)

    def _ask_all(self, order: Mapping[str, Any], contents: Mapping[str, bytes] | None = None) -> dict[str, Message]:
        return self._processes.ask_each(dict.fromkeys(self._names, order), contents)


def _list_suspects(answers: Mapping[str, Message]) -> list[int]:
    return sorted({stage for answer, _ in answers.values() for stage in answer.get("suspects", ())})
