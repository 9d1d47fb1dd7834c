"""One party's copy of one stage: module, optimizer and the digest of both."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from phalanx.errors import StaleReplicaError, TrainingError
from phalanx.models import StageModule, StageSpec, add_embedding_noise, build_empty_stage
from phalanx.models.master_weights import keep_masters
from phalanx.optimizers import StageOptimizer
from phalanx.pipeline.plan import RowPrivacy, StepPlan
from phalanx.pipeline.protocol.messages import StateDigest
from phalanx.pipeline.protocol.tensor_stream import tensors_digest
from phalanx.pipeline.stage.runner import StageRunner
from phalanx.security.privacy import SecureStream, gaussian_noise, noise_seed


@torch.no_grad()
def noisy_mean(
    total: Mapping[str, Tensor], privacy: RowPrivacy, step: int, noise_key: bytes | None
) -> dict[str, Tensor]:
    """Add noise to a sum of clipped rows, and divide by the rows that a step has in the mean.

    The number of rows that were there divides nothing, for it depends on whether a row was.

    Args:
        total: Sums by name; not changed.
        noise_key: Noise key of the stage in the step's epoch.

    Raises:
        TrainingError: There is no key; a sum without noise must not leave.

    Guarantees:
        The same arguments give the same bits to parties of one numeric class, which is measured with the noise in it.
    """
    if noise_key is None:
        raise TrainingError(f"privacy: the noise key of step {step} is missing; the owner sends one with each epoch")
    return seeded_mean(total, privacy, {name: noise_seed(noise_key, step, name) for name in total})


@torch.no_grad()
def seeded_mean(total: Mapping[str, Tensor], privacy: RowPrivacy, seeds: Mapping[str, bytes]) -> dict[str, Tensor]:
    """As `noisy_mean`, from the seeds of this step alone, which open no other step's noise."""
    noisy = {}
    for name in sorted(total):
        stream, like = SecureStream(seeds[name]), total[name]
        noise = torch.from_numpy(gaussian_noise(stream, like.numel(), privacy.noise_deviation)).view_as(like)
        noisy[name] = like.add(noise.to(like.device)).div_(privacy.mean_rows)
    return noisy


_DIGEST_CHARACTERS = 64
"""BLAKE3, hex."""


class StageCopy:
    """A copy of a stage, as its holder and its shadow have one each; the same steps give both the same bits."""

    def __init__(self, plan: StepPlan, spec: StageSpec, module: StageModule, optimizer: StageOptimizer) -> None:
        self.plan = plan
        self.spec = spec
        self.module = module
        module.attends = plan.effective_attention
        module.router_share = 1.0 / plan.microbatches
        add_embedding_noise(module, plan.neftune_alpha)
        self.optimizer = optimizer
        self.runner = StageRunner(
            module,
            spec,
            seed=plan.seed,
            precision=plan.arithmetic,
            device=plan.device,
            row_clip=plan.row_clip,
        )
        self._frozen_digest: str | None = None

    @classmethod
    def build_empty(cls, plan: StepPlan, stage: int, *, has_moments: bool = True) -> "StageCopy":
        """Build a copy with parameters that will come over the network."""
        spec = stage_spec(plan, stage)
        module = build_empty_stage(
            plan.hub_config,
            spec,
            adapter=plan.adapter,
            activation_checkpointing=plan.activation_checkpointing,
            attention=plan.attention,
            device=plan.device,
        )
        return cls.of_module(plan, spec, module, has_moments=has_moments)

    @classmethod
    def of_module(
        cls, plan: StepPlan, spec: StageSpec, module: StageModule, *, has_moments: bool = True
    ) -> "StageCopy":
        """Take a module that has its parameters."""
        if plan.precision == "bf16_weights":
            keep_masters(module)
        optimizer = StageOptimizer(
            module.trainable_parameters(),
            plan.optimizer,
            has_moments=has_moments,
            single_rounding=plan.guard.classes == "mixed" or plan.numerics != "float",
            renewed_every=plan.steps_a_round,
        )
        return cls(plan, spec, module, optimizer)

    @property
    def step_count(self) -> int:
        """Optimizer steps taken."""
        return self.optimizer.num_steps

    def state_tensors(self) -> dict[str, Tensor]:
        """All tensors of the copy (not copies of them): frozen/..., weight/..., exp_avg/..., exp_avg_sq/..."""
        return {**self._frozen_tensors(), **self.optimizer.state_tensors()}

    def weight_tensors(self) -> dict[str, Tensor]:
        """The parameters alone, frozen ones included."""
        return {**self._frozen_tensors(), **self.trained_tensors()}

    def trained_tensors(self) -> dict[str, Tensor]:
        """The parameters that the optimizer moves: weight/..."""
        return {name: t for name, t in self.optimizer.state_tensors().items() if name.startswith("weight/")}

    def load_tensors(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Copy a whole state in.

        Raises:
            CheckpointError: Names, shapes or types are not this stage's.
        """
        frozen = self._frozen_tensors()
        for name, tensor in frozen.items():
            tensor.copy_(tensors[name])
        rest = {name: tensor for name, tensor in tensors.items() if name not in frozen}
        self.optimizer.load_state(rest, num_steps)
        self._frozen_digest = None

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy parameters in and leave the optimizer as it is: enough to recompute messages."""
        for name, tensor in self.weight_tensors().items():
            tensor.copy_(tensors[name])
        self._frozen_digest = None

    def weights_digest(self) -> str:
        """The part of the digest that the parameters decide; moments are not read."""
        state = self.optimizer.readable_state()
        return self._frozen_part() + tensors_digest(state, (name for name in state if name.startswith("weight/")))

    def compute_digest(self) -> StateDigest:
        """Digest weights and optimizer moments."""
        return state_digest(self.optimizer.readable_state(), self._frozen_part(), self.step_count)

    def weight_gradient(self, step: int, noise_key: bytes | None) -> dict[str, Tensor]:
        """Return the gradient of a step with microbatches that have all run, as it is committed to and applied.

        Args:
            noise_key: Noise key of the stage in this epoch; None where rows are not hidden.

        Raises:
            TrainingError: Rows are to be hidden, and there is no key.
        """
        gradients, privacy = self.runner.take_gradients(), self.plan.privacy
        return gradients if privacy is None else noisy_mean(gradients, privacy, step, noise_key)

    def apply_update(self, step: int, gradients: Mapping[str, Tensor], clip_coefficient: float) -> None:
        """Let the optimizer take step number `step` (from 0); with a guard it can be undone."""
        self._expect_step(step)
        if self.plan.guard.is_enabled:
            self.optimizer.keep_snapshot()
        self.optimizer.step(dict(gradients), self.plan.learning_rate(step), clip_coefficient)

    def rewind_to(self, step: int) -> None:
        """Go back to the state before `step`, bit for bit."""
        if self.step_count <= step:
            return
        if not self.optimizer.can_undo(step):
            raise StaleReplicaError(f"stage {self.spec.index}: the state of step {step} is not saved")
        self.optimizer.restore_snapshot()

    def before_update(self, step: int) -> dict[str, Tensor]:
        """The parameters as they were before `step`, which is the present one or the last one."""
        if self.step_count == step:
            return self.weight_tensors()
        if not self.optimizer.can_undo(step):
            raise StaleReplicaError(f"stage {self.spec.index}: the weights of step {step} are not saved")
        undo = self.optimizer.undo_state()
        return {**self._frozen_tensors(), **{name: undo[name] for name in undo if name.startswith("weight/")}}

    def _expect_step(self, step: int) -> None:
        if self.step_count != step:
            raise StaleReplicaError(
                f"stage {self.spec.index}: the copy is at step {self.step_count}, but the update is for {step}; "
                "resynchronise it"
            )

    def _frozen_tensors(self) -> dict[str, Tensor]:
        trained = {id(parameter) for parameter in self.module.trainable_parameters().values()}
        return {
            f"frozen/{name}": parameter.detach()
            for name, parameter in self.module.all_parameters().items()
            if id(parameter) not in trained
        }

    def _frozen_part(self) -> str:
        """The digest of frozen weights, which are hashed once."""
        if self._frozen_digest is None:
            self._frozen_digest = tensors_digest(self._frozen_tensors())
        return self._frozen_digest


WrapCopy = Callable[[StageCopy, bool], StageCopy]
"""Puts an attacker in the place of an honest copy in a drill; the flag says whether the copy is held or shadowed."""


def leave_unwrapped(copy: StageCopy, held: bool) -> StageCopy:
    """Return the wrapped copy itself, with which honest parties work."""
    del held
    return copy


def state_digest(state: Mapping[str, Tensor], frozen: str, step: int) -> StateDigest:
    """Digest a state with frozen weights that are known by their digest."""
    weights = [name for name in state if name.startswith("weight/")]
    moments = [name for name in state if not name.startswith("weight/")]
    return StateDigest(
        step=step, weights=f"{frozen}{tensors_digest(state, weights)}", moments=tensors_digest(state, moments)
    )


def frozen_part(state: StateDigest) -> str:
    """The part of a state's digest that frozen weights decide; that of trained ones comes behind it."""
    return state.weights[:-_DIGEST_CHARACTERS]


def trained_shapes(plan: StepPlan, stage: int) -> dict[str, Tensor]:
    """Return the trained tensors of a stage without values, on the meta device; the stage is built to know them."""
    state = StageCopy.build_empty(plan, stage).optimizer.state_tensors()
    return {name: tensor.detach().to("meta") for name, tensor in state.items()}


def stage_spec(plan: StepPlan, stage: int) -> StageSpec:
    """The layers of one stage."""
    layers = plan.stages[stage]
    return StageSpec(stage, len(plan.stages), layers.first_layer, layers.end_layer)
