"""A pipeline in training, as its middle stages see it, with an owner who adds noise to its messages."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.data import DataConfig
from phalanx.data.config import BpeConfig
from phalanx.data.sources import PythonManualConfig
from phalanx.engine import NO_EXTRAS, StepInputs
from phalanx.lab.attacks.copies import AttackedCopy, AttackedRunner
from phalanx.lab.reproduce.attacker import Attacker
from phalanx.lab.reproduce.simulator import MessageCheck, NoMessageCheck, Simulator, StageTensor
from phalanx.lab.reproduce.stage_leaks.size import RANK, PipelineSize, Regime
from phalanx.models import LoraConfig, ModelConfig, ModelSource
from phalanx.objectives import OBJECTIVES, Objective
from phalanx.optimizers import OptimizerConfig
from phalanx.pipeline import GuardConfig, PipelineConfig, StageRunner
from phalanx.train import PipelineRun, TrainConfig
from phalanx.train.setup.layout import make_plan


@dataclass(frozen=True)
class StageMessages:
    """What arrives at each middle stage, over all microbatches.

    Attributes:
        activations: Inputs by stage, ``[rows, seq, dim]``.
        gradients: Gradients of outputs by stage, the same.
    """

    activations: Mapping[int, Tensor]
    gradients: Mapping[int, Tensor]


class OwnerNoise:
    """Gaussian noise on the owner's messages: activations of its first stage and gradients of its last one.

    The deviation is a share of each column's own over the positions of a message but the first one, so that no column
    is hidden less than another. It promises nothing: no length is clipped, and nothing is accounted for.
    """

    def __init__(self, level: float, seed: int) -> None:
        self.level = level
        # a figure that can be had again; an owner would draw from the operating system
        self._generator = torch.Generator().manual_seed(seed)

    def add_noise(self, sent: Tensor) -> Tensor:
        """Return a message ``[batch, seq, dim]`` with noise."""
        if not self.level:
            return sent
        deviation = self.level * sent[:, 1:].flatten(0, 1).std(dim=0)
        return sent + deviation * torch.randn(sent.shape, generator=self._generator)


class _OwnerRunner(AttackedRunner):
    """One of the owner's stages: it adds noise, and counts the processor time that it takes."""

    def __init__(self, honest: StageRunner, noise: OwnerNoise) -> None:
        super().__init__(honest)
        self._owner_noise = noise

    def forward(self, step: int, microbatch: int, x: Tensor) -> Tensor:
        y = self._honest.forward(step, microbatch, x)
        return y if self.spec.is_last else self._owner_noise.add_noise(y)

    def backward(self, step: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        result = self._honest.backward(step, microbatch, gradient)
        return result if result is None else self._owner_noise.add_noise(result)


class _TimedRunner(AttackedRunner):
    """A stage that counts its processor time."""

    def __init__(self, honest: StageRunner) -> None:
        super().__init__(honest)
        self.cpu_s = 0.0

    def forward(self, step: int, microbatch: int, x: Tensor) -> Tensor:
        started = time.process_time()
        y = self._honest.forward(step, microbatch, x)
        self.cpu_s += time.process_time() - started
        return y

    def compute_loss(
        self,
        microbatch: int,
        labels: Tensor,
        num_targets: int,
        extras: Mapping[str, Tensor] = NO_EXTRAS,
        objective: Objective = OBJECTIVES["causal_lm"],
    ) -> float:
        started = time.process_time()
        loss = self._honest.compute_loss(microbatch, labels, num_targets, extras, objective)
        self.cpu_s += time.process_time() - started
        return loss

    def backward(self, step: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        started = time.process_time()
        result = self._honest.backward(step, microbatch, gradient)
        self.cpu_s += time.process_time() - started
        return result


@dataclass(frozen=True)
class _UntilLastStage:
    """Stops every microbatch before the last stage: there is no loss, and nothing comes back."""

    last: int

    def accepts_message(self, message: StageTensor, /) -> bool:
        """Whether it is for another stage."""
        return message.target != self.last


@dataclass
class TrainedPipeline:
    """All parties of a pipeline in this process.

    Attributes:
        timed: A clock for each stage, in the order of the stages.
    """

    size: PipelineSize
    simulator: Simulator
    timed: list[_TimedRunner] = field(default_factory=list)

    @classmethod
    def build(
        cls, source: ModelSource, size: PipelineSize, regime: Regime, noise: OwnerNoise, seed: int
    ) -> "TrainedPipeline":
        """Build it with the weights that a model has."""
        run = pipeline_run(source, size, regime, seed)
        simulator = Simulator(source, make_plan(run, source), Attacker(None))
        timed = []
        for stage, copy in enumerate(simulator.copies):
            clock = _TimedRunner(copy.runner)
            timed.append(clock)
            is_owners = stage not in simulator.middle_range
            simulator.copies[stage] = AttackedCopy(copy, _OwnerRunner(clock, noise) if is_owners else clock)
        return cls(size, simulator, timed)

    def train(self, rows: Tensor, seed: int) -> None:
        """Train for the steps of its size on rows that are drawn anew for each."""
        generator = torch.Generator().manual_seed(seed)
        simulator = self.simulator
        for step in range(self.size.steps):
            drawn = rows[torch.randperm(len(rows), generator=generator)[: self.size.rows]]
            simulator.run_attempt(step, step_inputs_of(drawn, self.size.microbatches), NoMessageCheck())
            gradients = simulator.take_gradients()
            simulator.update_copies(step, gradients, simulator.combined_clip(gradients))

    def messages_of(self, rows: Tensor, *, forward_only: bool = False) -> StageMessages:
        """Send rows through, forward and backward, and return what arrives; no optimizer steps."""
        simulator = self.simulator
        sent: dict[str, dict[int, list[Tensor]]] = {
            direction: {stage: [] for stage in simulator.middle_range} for direction in ("forward", "backward")
        }
        watch: MessageCheck = _UntilLastStage(len(self.size.layers) - 1) if forward_only else NoMessageCheck()
        for part in torch.split(rows, self.size.rows // self.size.microbatches):
            attempt = simulator.run_attempt(0, step_inputs_of(part, 1), watch)
            for message in attempt.messages:
                if message.target in simulator.middle_range:
                    sent[message.direction][message.target].append(message.tensor.detach().bfloat16())
            simulator.abandon_attempt()
        joined = {
            direction: {stage: torch.cat(parts) for stage, parts in by_stage.items() if parts}
            for direction, by_stage in sent.items()
        }
        return StageMessages(joined["forward"], joined["backward"])

    @torch.no_grad()
    def held_out_loss(self, rows: Tensor) -> float:
        """Return the mean loss of the finished model, which its owner runs without noise, nats a token."""
        total, modules = 0.0, self.simulator.stage_modules
        for part in torch.split(rows, 8):
            x = part[:, :-1]
            for module in modules:
                x = module.eval()(x)
            total += float(torch.nn.functional.cross_entropy(x.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
        for module in modules:
            module.train()
        return total / rows[:, 1:].numel()

    @property
    def cpu_seconds(self) -> list[float]:
        """Processor time of each stage since the pipeline was built."""
        return [clock.cpu_s for clock in self.timed]


def step_inputs_of(rows: Tensor, microbatches: int) -> StepInputs:
    """Return rows ``[rows, length + 1]`` as inputs and labels."""
    parts = rows.chunk(microbatches)
    return StepInputs(
        tuple(part[:, :-1].contiguous() for part in parts),
        tuple(part[:, 1:].contiguous() for part in parts),
        rows[:, 1:].numel(),
    )


def pipeline_run(source: ModelSource, size: PipelineSize, regime: Regime, seed: int) -> PipelineRun:
    """The training as a run file would say it; its data section is never read."""
    model = ModelConfig(path=str(source.directory))
    if regime == "lora":
        model = model.model_copy(update={"adapter": LoraConfig(rank=RANK, alpha=2.0 * RANK)})
    return PipelineRun(
        model=model,
        data=DataConfig(sources=(PythonManualConfig(),), tokenizer=BpeConfig(), sequence_length=size.length),
        train=TrainConfig(steps=size.steps, batch_size=size.rows, microbatches=size.microbatches, seed=seed),
        optimizer=OptimizerConfig(lr=size.rates[regime], warmup_steps=size.steps // 10, schedule="constant"),
        pipeline=PipelineConfig(stages=len(size.layers), layers=size.layers, rebalance_every=0),
        guard=GuardConfig(mode="off"),
    )
