"""Everything a party must know to build and run a stage; the owner sends it to every worker that joins."""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field, ValidationError, model_serializer

from phalanx.config import StrictModel, canonical_json, one_of
from phalanx.config.strict import check_reference
from phalanx.errors import FrameError
from phalanx.exact import rounded_cosine
from phalanx.models import MARKED_KINDS, Attention, AttentionKind, SlicedAdapter, rows_before
from phalanx.objectives import ObjectiveChoice
from phalanx.optimizers import OptimizerConfig, learning_rate
from phalanx.pipeline.config import GuardConfig
from phalanx.planner.model.config_keys import ConfigKeys
from phalanx.planner.model.families import FAMILIES
from phalanx.planner.schedules import verifiable_schedules

Precision = Literal["fp32", "bf16", "bf16_weights"]
Numerics = Literal["float", "exact", "exact_fast"]

DEFAULT_OBJECTIVE = "causal_lm"

BOUNDARY_DTYPE = torch.float32
"""Type of every tensor that crosses a boundary: under bf16 autocast the residual stream stays in fp32, and stages with
bf16 weights widen what they give."""


class StageRange(StrictModel):
    """The layers of one stage."""

    first_layer: int
    end_layer: int


class RowPrivacy(StrictModel):
    """How stages hide single training rows; each microbatch is one row, or none.

    Attributes:
        clip_norm: Largest distance by which one row may move the sum of its step, all stages together.
        noise_multiplier: Standard deviation of the noise on each number of the sum, in units of `clip_norm`.
        mean_rows: Rows that a step has in the mean, by which the noisy sum is divided.
    """

    clip_norm: float = Field(gt=0.0, allow_inf_nan=False)
    noise_multiplier: float = Field(ge=0.0, allow_inf_nan=False)
    mean_rows: int = Field(ge=1)

    @property
    def noise_deviation(self) -> float:
        """Standard deviation of the noise on each number of a sum."""
        return self.noise_multiplier * self.clip_norm


class StepPlan(StrictModel):
    """The run as every party sees it. Public: it holds no data, no secret and no audit."""

    run_digest: str
    hub_config: dict[str, Any]
    hidden_size: int
    stages: tuple[StageRange, ...]
    schedule: Annotated[str, one_of(verifiable_schedules)]
    microbatches: int
    microbatch_size: int
    sequence_length: int
    total_steps: int
    seed: int
    precision: Precision
    numerics: Numerics = "float"
    """The law of arithmetic; all but "float" give every party the same bits."""
    device: str
    attention: Attention
    activation_checkpointing: bool
    adapter: SlicedAdapter | None
    optimizer: OptimizerConfig
    guard: GuardConfig
    objective: ObjectiveChoice = DEFAULT_OBJECTIVE
    family: Annotated[str, AfterValidator(check_reference)] | None = None
    """Code of the owner's own that cuts the model; a party has it from a file of its own, or has no part in the run."""
    document_attention: bool = False
    """Whether attention stays inside documents, the borders of which cross beside the hidden states."""
    neftune_alpha: float | None = None
    """Size of the noise that the first stage adds to embeddings."""
    attention_kind: Literal["causal", "prefix", "bidirectional"] = "causal"
    """Which tokens see which, where it does not; where rows have prefixes, these cross beside the hidden states."""
    steps_a_round: int | None = Field(default=None, ge=1)
    """Steps of a federated round, which begins with a new optimizer and has one learning rate; None where there are no
    rounds."""
    privacy: RowPrivacy | None = None
    """How single rows are hidden; None where they are not."""

    @model_serializer(mode="wrap")
    def _omit_float(self, write: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Leave the law out where it is torch's own: a plan has the digest, and its audits the draws, of before."""
        return {name: value for name, value in write(self).items() if (name, value) != ("numerics", "float")}

    @property
    def arithmetic(self) -> str:
        """How a stage computes: the precision, or the grade of exact numerics, which are in fp32."""
        return self.precision if self.numerics == "float" else self.numerics

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        round_steps = self.steps_a_round or 1
        cosine = math.cos if self.numerics == "float" else rounded_cosine
        return learning_rate(self.optimizer, step // round_steps, self.total_steps // round_steps, cosine)

    @property
    def effective_attention(self) -> AttentionKind:
        """Which tokens see which."""
        return "documents" if self.document_attention else self.attention_kind

    @property
    def row_clip(self) -> float | None:
        """Bound of one row's gradient in each stage, so that no norm has to cross stages; None where rows count whole.

        Source: He et al. 2023, "Exploring the limits of differentially private deep learning with group-wise clipping",
        per-device clipping with bounds that are alike.
        """
        return None if self.privacy is None else self.privacy.clip_norm / math.sqrt(len(self.stages))

    @property
    def hidden_shape(self) -> tuple[int, int, int]:
        """Shape of every tensor that crosses a boundary: ``[batch, seq, dim]`` of one microbatch."""
        family, beside = FAMILIES.get(self.hub_config.get("model_type", "")), 0
        if family is not None:
            beside = family.rows_beside(ConfigKeys(self.hub_config, "model config"))
        tokens = rows_before(self.adapter) + self.sequence_length + beside
        return (self.microbatch_size, tokens, self.hidden_size + (self.effective_attention in MARKED_KINDS))

    @property
    def hidden_bytes(self) -> int:
        """Size of every tensor that crosses a boundary."""
        return math.prod(self.hidden_shape) * BOUNDARY_DTYPE.itemsize


def parse_plan(body: dict[str, Any]) -> StepPlan:
    """Parse the plan that an owner sent."""
    try:
        return StepPlan.model_validate_json(canonical_json(body))
    except (ValidationError, ValueError) as exc:
        raise FrameError(f"the owner's plan is malformed: {exc}") from exc
