"""The sources of a stage at the owner: the model's files, or a checkpoint of this run."""

from collections.abc import Mapping, Set

import torch
from torch import Tensor
from torch.nn import Parameter

from phalanx.checkpoint import Checkpoint
from phalanx.models import ModelSource, StageModule, StageSpec, build_stage, tie_head
from phalanx.pipeline import StageCopy, StateDigest, StepPlan, TrainedState, stage_spec

_WEIGHT = "weight/"


class StageLibrary:
    """A library that builds each stage from its own tensors only, and ties the last stage's head to the embedding.

    Args:
        checkpoint: Checkpoint where the run goes on; None where it begins.
        adapter_directory: Directory of an adapter's first values, which the plan lacks; None where its seed draws them.
            A checkpoint has later ones.
    """

    def __init__(
        self,
        source: ModelSource,
        plan: StepPlan,
        checkpoint: Checkpoint | None,
        adapter_directory: str | None = None,
    ) -> None:
        self._source = source
        self._plan = plan
        self._checkpoint = checkpoint
        self._adapter = plan.adapter
        if plan.adapter is not None and checkpoint is None:
            self._adapter = plan.adapter.model_copy(update={"path": adapter_directory})
        self._first: StageCopy | None = None

    @property
    def num_stages(self) -> int:
        """How many stages it can build."""
        return len(self._plan.stages)

    def __call__(self, stage: int, trained: TrainedState | None = None, /) -> StageCopy:
        """Build one stage with its weights, and its optimizer's state when there is a checkpoint."""
        spec = stage_spec(self._plan, stage)
        module = self._build_module(spec)
        # a whole model ties its own head; another copy of it may have been built before
        first = None if spec.has_embedding or not spec.is_last else self._first
        if first is not None:
            tie_head(first.module, module)
        copy = StageCopy.of_module(self._plan, spec, module)
        if spec.has_embedding:
            self._first = copy
        elif first is not None:
            first.runner.adopt_head(copy.runner)
        if trained is not None:
            copy.optimizer.load_state(trained.tensors, trained.num_steps)
        elif self._checkpoint is not None:
            copy.optimizer.load_state(*_read_state(self._checkpoint, stage, copy.optimizer.state_tensors().keys()))
        return copy

    def _build_module(self, spec: StageSpec) -> StageModule:
        return build_stage(
            self._source,
            spec,
            adapter=self._adapter,
            activation_checkpointing=self._plan.activation_checkpointing,
            attention=self._plan.attention,
            seed=self._plan.seed,
            device=self._plan.device,
        )

    def stage_digests(self) -> dict[int, StateDigest]:
        """Digest of every middle stage as this library has it; each is built, digested and let go."""
        return {stage: self(stage).compute_digest() for stage in range(1, len(self._plan.stages) - 1)}


def _read_state(checkpoint: Checkpoint, stage: int, names: Set[str]) -> tuple[dict[str, Tensor], int]:
    """Return a stage's tensors, from whichever stages held them where the layers were cut otherwise, and its steps."""
    if stage in checkpoint.stages and checkpoint.tensor_names(stage) == names:
        return checkpoint.stage_tensors(stage), checkpoint.num_steps(stage)
    return checkpoint.read_tensors(names), checkpoint.num_steps(checkpoint.stages[0])


class BackLibrary(StageLibrary):
    """A library of the stages of a back part, from the state of the whole.

    Args:
        state: Weights and moments of all that is trained, by name; copied when a stage is built.
        num_steps: Optimizer steps that led to it.
    """

    def __init__(self, source: ModelSource, plan: StepPlan, state: Mapping[str, Tensor], num_steps: int) -> None:
        super().__init__(source, plan, None)
        self._state, self._num_steps = state, num_steps

    def __call__(self, stage: int, trained: TrainedState | None = None, /) -> StageCopy:
        copy = super().__call__(stage, trained)
        if trained is not None:
            return copy
        copy.optimizer.load_state({name: self._state[name] for name in copy.optimizer.state_tensors()}, self._num_steps)
        return copy


class RoundModules:
    """The stages of a model that its owner keeps in memory, for all rounds; each is built once."""

    def __init__(self, source: ModelSource, plan: StepPlan, adapter_directory: str | None = None) -> None:
        self.source, self.plan = source, plan
        library = StageLibrary(source, plan, None, adapter_directory)
        self.all = [library(stage).module for stage in range(len(plan.stages))]

    @property
    def trained_parameters(self) -> dict[str, Parameter]:
        """What is trained of all stages, by name."""
        return {name: parameter for module in self.all for name, parameter in module.trainable_parameters().items()}

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights of exactly the trained tensors."""
        for name, parameter in self.trained_parameters.items():
            parameter.copy_(weights[name])

    def begin_round(self, weights: Mapping[str, Tensor], num_steps: int) -> "RoundLibrary":
        """Return the stages of a round, with these weights and optimizers that are new."""
        for module in self.all:
            # a step that was broken off leaves gradients
            module.zero_grad(set_to_none=True)
        return RoundLibrary(self, weights, num_steps)


class RoundLibrary(StageLibrary):
    """A library of the stages of one round; a copy that it makes has the module that is in memory.

    Args:
        modules: Modules of the model; those of an earlier round are no longer at work.
        weights: Trained weights by name; copied when a stage is asked for.
        num_steps: Steps of all rounds before.
    """

    def __init__(self, modules: RoundModules, weights: Mapping[str, Tensor], num_steps: int) -> None:
        super().__init__(modules.source, modules.plan, None)
        self._modules, self._weights, self._num_steps = modules.all, weights, num_steps

    def _build_module(self, spec: StageSpec) -> StageModule:
        return self._modules[spec.index]

    def __call__(self, stage: int, trained: TrainedState | None = None, /) -> StageCopy:
        copy = super().__call__(stage, trained)
        if trained is not None:
            return copy
        state = copy.optimizer.state_tensors()
        weights = {name: self._weights[name.removeprefix(_WEIGHT)] for name in state if name.startswith(_WEIGHT)}
        # moments of an optimizer that was made just now are zero
        copy.optimizer.load_state({**state, **weights}, self._num_steps)
        return copy
