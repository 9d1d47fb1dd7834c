"""The sources of a stage at the owner: the model's files, or a checkpoint of this run."""

from collections.abc import Mapping

from torch import Tensor

from phalanx.checkpoint import Checkpoint
from phalanx.models import ModelSource, build_stage, tie
from phalanx.pipeline import StageCopy, StateDigest, StepPlan, stage_spec


class StageLibrary:
    """A library that builds each stage from its own tensors only, and ties the last stage's head to the embedding.

    Args:
        source: The model.
        plan: As all parties have it.
        checkpoint: Where the run goes on from; None where it begins.
        adapter_directory: Where the first values of an adapter lie, which the plan does not tell; None where its seed
            draws them. A checkpoint has later ones.
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

    def __call__(self, stage: int) -> StageCopy:
        """Build one stage with its weights, and its optimizer's state when there is a checkpoint.

        Raises:
            ModelError: A tensor is missing or wrong.
            CheckpointError: The checkpoint is not of this model.
        """
        spec = stage_spec(self._plan, stage)
        module = build_stage(
            self._source,
            spec,
            adapter=self._adapter,
            activation_checkpointing=self._plan.activation_checkpointing,
            attention=self._plan.attention,
            seed=self._plan.seed,
            device=self._plan.device,
        )
        if spec.is_last and self._first is not None:
            tie(self._first.module, module)
        copy = StageCopy.of_module(self._plan, spec, module)
        if spec.embeds:
            self._first = copy
        elif spec.is_last and self._first is not None:
            self._first.runner.adopt_head(copy.runner)
        if self._checkpoint is not None:
            copy.optimizer.load_state(self._checkpoint.tensors(stage), self._checkpoint.num_steps(stage))
        return copy

    def digests(self) -> dict[int, StateDigest]:
        """Digest of every middle stage as this library has it; each is built, digested and let go."""
        return {stage: self(stage).digest() for stage in range(1, len(self._plan.stages) - 1)}


class BackLibrary(StageLibrary):
    """A library of the stages of a back part, from the state of the whole.

    Args:
        source: The model.
        plan: Its stages are those of the back part.
        state: Weights and moments of all that is trained, by name; copied when a stage is built.
        num_steps: Optimizer steps that led to it.
    """

    def __init__(self, source: ModelSource, plan: StepPlan, state: Mapping[str, Tensor], num_steps: int) -> None:
        super().__init__(source, plan, None)
        self._state, self._num_steps = state, num_steps

    def __call__(self, stage: int) -> StageCopy:
        """Build one stage with the part of the state that is its own."""
        copy = super().__call__(stage)
        copy.optimizer.load_state({name: self._state[name] for name in copy.optimizer.state()}, self._num_steps)
        return copy
