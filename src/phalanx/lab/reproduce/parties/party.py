"""The process of one party: stages with the duplicates of the stages before them, or the central server."""

import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from phalanx.child import Message, answer_orders, die_with_parent
from phalanx.lab.reproduce.arms.duplicates import DuplicatedBlock
from phalanx.lab.reproduce.parties.links import MessageKey, TensorLinks
from phalanx.lab.reproduce.parties.settings import PaperRun
from phalanx.models import open_model
from phalanx.optimizers import gradient_norm_squared
from phalanx.pipeline import keep_freed_memory
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.process import deterministic_kernels
from phalanx.train.setup.stage_source import StageLibrary

SERVER = "server"
OWNER = "owner"


def holder_of(stage: int, num_stages: int) -> str:
    """Return the party of a stage: the owner has the first and the last one, as in the paper."""
    return OWNER if stage in (0, num_stages - 1) else f"worker-{stage}"


@dataclass(frozen=True)
class Attempt:
    """One attempt at a step.

    Attributes:
        path: Stages that take part, in order.
        idle: Stages that nobody checks: they are frozen in this attempt.
    """

    step: int
    number: int
    num_microbatches: int
    num_stages: int
    path: Sequence[int]
    idle: Collection[int]

    def key(self, kind: str, microbatch: int, about: int) -> MessageKey:
        """Name a message of this attempt."""
        return MessageKey(kind, self.step, self.number, microbatch, about)

    def stage_before(self, stage: int) -> int:
        """Return the stage that this one gets activations from."""
        return self.path[self.path.index(stage) - 1]

    def stage_after(self, stage: int) -> int:
        """Return the stage that this one sends activations to, where its duplicate is."""
        return self.path[self.path.index(stage) + 1]

    def is_checked(self, stage: int) -> bool:
        """Whether a duplicate repeats the stage's work."""
        return 0 < stage < self.num_stages - 1 and stage not in self.idle

    def party_of(self, stage: int) -> str:
        """Return the party that holds a stage."""
        return holder_of(stage, self.num_stages)


class PaperParty:
    """A party with stages; it lies where the run's attacker says so."""

    def __init__(self, paper_run: PaperRun, cache: Path, stages: Sequence[int], links: TensorLinks) -> None:
        run, middle = paper_run.run, paper_run.middle_stages
        source = open_model(run.model, cache, run.train.seed)
        library = StageLibrary(source, make_plan(run, source), None)
        self._defence, self._lie = paper_run.paper.defence, paper_run.paper.lie
        self._attacker = paper_run.make_attacker()
        self._links = links
        self._stages = {stage: library(stage) for stage in stages}
        if self._lie in ("forward", "backward"):
            for stage in set(stages) & set(middle):
                self._stages[stage] = self._attacker.wrapper_for(stage)(self._stages[stage], True)
        self._blocks: dict[int, DuplicatedBlock] = {}
        self.duplicate_bytes = 0
        for stage in stages if self._defence != "none" else ():
            if stage - 1 in middle:
                copy = library(stage - 1)
                self.duplicate_bytes += sum(tensor.nbytes for tensor in copy.state_tensors().values())
                self._blocks[stage - 1] = DuplicatedBlock(copy)
        self._gradients: dict[int, dict[str, Tensor]] = {}

    def run_forward(self, attempt: Attempt, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """Run all microbatches through the stages of this party that take part.

        Args:
            inputs: ``ids`` and ``labels``, ``[microbatches, rows, seq]``, and ``targets``, at the owner.

        Returns:
            The sum of losses, and the stages whose activations a duplicate did not get too.
        """
        loss_sum, suspects = 0.0, set[int]()
        for stage in (stage for stage in attempt.path if stage in self._stages):
            runner = self._stages[stage].runner
            for m in range(attempt.num_microbatches):
                before = None if stage == 0 else attempt.stage_before(stage)
                message = {} if before is None else self._links.await_tensors(attempt.key("forward", m, before))
                x = inputs["ids"][m] if before is None else message["y"]
                if self._lie == "false_input" and self._attacker.lying_stage_at(attempt.step) == stage:
                    x = -x
                y = runner.forward(attempt.step, m, x)
                if stage == attempt.path[-1]:
                    loss_sum += runner.compute_loss(m, inputs["labels"][m], int(inputs["targets"]))
                else:
                    self._send_activation(attempt, stage, m, x, y)
                if before in self._blocks and attempt.is_checked(before):
                    if self._defence == "jumping_connection":
                        message |= self._links.await_tensors(attempt.key("jump", m, before))
                    if not self._blocks[before].repeats_forward(attempt.step, m, message["x"], message["y"]):
                        suspects.add(before)
        return {"loss_sum": loss_sum, "suspects": sorted(suspects)}

    def run_backward(self, attempt: Attempt) -> dict[str, Any]:
        """Bring the gradients back; return the stages whose gradients a duplicate did not get too."""
        suspects = set[int]()
        for stage in (stage for stage in reversed(attempt.path) if stage in self._stages):
            sent: list[Tensor] = []
            for m in range(attempt.num_microbatches):
                gradient = None
                if stage != attempt.path[-1]:
                    key = attempt.key("backward", m, attempt.stage_after(stage))
                    gradient = self._links.await_tensors(key)["g"]
                result = self._stages[stage].runner.backward(attempt.step, m, gradient)
                if stage != 0 and result is not None:
                    self._send_gradient(attempt, stage, m, result)
                    sent.append(result)
            before = None if stage == 0 else attempt.stage_before(stage)
            if before in self._blocks and attempt.is_checked(before):
                for m, gradient in enumerate(sent):
                    claimed = self._links.await_tensors(attempt.key("claim", m, before))["g"]
                    if not self._blocks[before].repeats_backward(attempt.step, m, gradient, claimed):
                        suspects.add(before)
        return {"suspects": sorted(suspects)}

    def measure_norms(self) -> dict[str, Any]:
        """Return the square of the norm of each stage's gradient, which waits for `take_update`."""
        self._gradients = {stage: copy.runner.take_gradients() for stage, copy in self._stages.items()}
        return {"squares": [[stage, gradient_norm_squared(one)] for stage, one in self._gradients.items()]}

    def take_update(self, lr: float, clip: float, frozen: Collection[int]) -> dict[str, Any]:
        """Let the stages that are not frozen take the step, and their duplicates on their own gradients."""
        for stage, gradients in self._gradients.items():
            if stage not in frozen:
                self._stages[stage].optimizer.step(gradients, lr, clip)
        for stage, block in self._blocks.items():
            gradients_of_block = block.take_gradients()
            if stage not in frozen:
                block.take_step(gradients_of_block, lr, clip)
        return {}

    def abandon_attempt(self) -> dict[str, Any]:
        """Forget graphs and gradients."""
        for copy in self._stages.values():
            copy.runner.abandon_step()
        for block in self._blocks.values():
            block.drop_graphs()
        return {}

    def stage_weights(self) -> dict[str, Tensor]:
        """All parameters of the stages."""
        return {
            name: tensor.detach().contiguous()
            for copy in self._stages.values()
            for name, tensor in copy.module.all_parameters().items()
        }

    def _send_activation(self, attempt: Attempt, stage: int, m: int, x: Tensor, y: Tensor) -> None:
        after = attempt.stage_after(stage)
        key, party = attempt.key("forward", m, stage), attempt.party_of(after)
        match self._defence:
            case "central_server":
                self._links.send_tensors(SERVER, key, {"y": y})
            case "duplicated_block" if attempt.is_checked(stage):
                self._links.send_tensors(party, key, {"y": y, "x": x})
            case "jumping_connection" if attempt.is_checked(after):
                self._links.send_tensors(party, key, {"y": y})
                lies = self._lie == "equivocation" and self._attacker.lying_stage_at(attempt.step) == stage
                beyond = attempt.party_of(attempt.stage_after(after))
                self._links.send_tensors(beyond, attempt.key("jump", m, after), {"x": -y if lies else y})
            case _:
                self._links.send_tensors(party, key, {"y": y})

    def _send_gradient(self, attempt: Attempt, stage: int, m: int, gradient: Tensor) -> None:
        key = attempt.key("backward", m, stage)
        if self._defence == "central_server":
            self._links.send_tensors(SERVER, key, {"g": gradient})
            return
        self._links.send_tensors(attempt.party_of(attempt.stage_before(stage)), key, {"g": gradient})
        if self._defence != "none" and attempt.is_checked(stage):
            holder = attempt.party_of(attempt.stage_after(stage))
            self._links.send_tensors(holder, attempt.key("claim", m, stage), {"g": gradient})


class CentralServer:
    """The trusted server of figure 3b: every tensor goes through it.

    It keeps the last output of each stage, so that it has a pair of input and output of every stage and not two words
    for it, and hands the pair to the stage behind, which is the next but one of the input's sender.
    """

    def __init__(self, links: TensorLinks) -> None:
        self._links = links

    def run_forward(self, attempt: Attempt, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """Hand on the activations of all microbatches; it has no inputs."""
        del inputs
        outputs: dict[tuple[int, int], Tensor] = {}
        for _ in range(attempt.num_microbatches * (len(attempt.path) - 1)):
            key, tensors = self._links.await_any()
            stage, m = key.about, key.microbatch
            outputs[stage, m] = tensors["y"]
            if attempt.is_checked(stage):
                tensors["x"] = outputs[attempt.stage_before(stage), m]
            self._links.send_tensors(attempt.party_of(attempt.stage_after(stage)), key, tensors)
        return {}

    def run_backward(self, attempt: Attempt) -> dict[str, Any]:
        """Hand on the gradients of all microbatches, to the stage before and to the duplicate."""
        for _ in range(attempt.num_microbatches * (len(attempt.path) - 1)):
            key, tensors = self._links.await_any()
            stage, m = key.about, key.microbatch
            self._links.send_tensors(attempt.party_of(attempt.stage_before(stage)), key, tensors)
            if attempt.is_checked(stage):
                holder = attempt.party_of(attempt.stage_after(stage))
                self._links.send_tensors(holder, attempt.key("claim", m, stage), tensors)
        return {}


class _PartyProcess:
    """Answers the orders of the initiator."""

    def __init__(self) -> None:
        self._links: TensorLinks | None = None
        self._party: PaperParty | CentralServer | None = None
        self._opened_at_s = 0.0

    def answer_order(self, order: dict[str, Any], content: bytes) -> Iterator[Message]:
        """Carry one order out."""
        if order["do"] == "open":
            if self._links is not None:
                self._links.close()
            links = self._links = TensorLinks(order["name"])
            paper_run = PaperRun.model_validate_json(order["run"])
            self._party = (
                CentralServer(links)
                if order["name"] == SERVER
                else PaperParty(paper_run, Path(order["cache"]), order["stages"], links)
            )
            self._opened_at_s = time.process_time()
            yield {"port": links.port}, b""
        elif order["do"] == "weights" and isinstance(self._party, PaperParty):
            yield {}, safetensors.torch.save(self._party.stage_weights())
        else:
            yield self._answer_plainly(order, content), b""

    def _answer_plainly(self, order: dict[str, Any], content: bytes) -> dict[str, Any]:
        party, links, what = self._party, self._links, order["do"]
        if links is None or party is None:
            raise ValueError(f"{what}: the party is not open")
        if what == "connect":
            links.set_addresses(order["ports"])
        elif what == "usage":
            return {
                "cpu_s": time.process_time() - self._opened_at_s,
                "sent_bytes": dict(links.sent_bytes),
                "duplicate_bytes": party.duplicate_bytes if isinstance(party, PaperParty) else 0,
            }
        elif "attempt" in order:
            attempt = Attempt(**order["attempt"])
            if what == "backward":
                return party.run_backward(attempt)
            return party.run_forward(attempt, safetensors.torch.load(content) if content else {})
        elif isinstance(party, PaperParty):
            return self._close_step(party, order)
        return {}

    def _close_step(self, party: PaperParty, order: dict[str, Any]) -> dict[str, Any]:
        match order["do"]:
            case "norms":
                return party.measure_norms()
            case "update":
                return party.take_update(order["lr"], order["clip"], order["frozen"])
            case _:
                return party.abandon_attempt()


if __name__ == "__main__":
    die_with_parent()
    torch.set_num_threads(1)
    keep_freed_memory()
    with deterministic_kernels(threads=1):
        answer_orders(_PartyProcess().answer_order)
    sys.exit(0)
