"""The section ``[train]`` of a run file: how long, in which batches, towards what, and when to look and to end."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from phalanx.config import RefusedKeyError, StrictModel
from phalanx.config.strict import later_key
from phalanx.data.config import HELD_OUT
from phalanx.objectives import OBJECTIVES, RolloutSettings, SingleObjective, kind_of


class EarlyStoppingConfig(StrictModel):
    """When a run ends before its last step: after so many validations in a row that brought nothing."""

    patience: int = Field(ge=1)
    """Validations in a row without an improvement, after which the run ends."""
    min_improvement: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """By how many nats the validation loss must fall below the best one so far to count as an improvement."""
    on: str = HELD_OUT
    """Name of the validation set that decides; left out, the held-out share."""


class SamplesConfig(StrictModel):
    """Texts that the model writes after each validation, for a person to read."""

    prompts: tuple[Annotated[str, Field(min_length=1, max_length=1000)], ...] = Field(min_length=1, max_length=8)
    """The beginnings of the texts."""
    tokens: int = Field(default=32, ge=1, le=256)
    """At most so many tokens are written for each prompt."""
    temperature: float = Field(default=0.0, ge=0.0, le=10.0, allow_inf_nan=False)
    """Of the draw of each token, with the run's seed; 0 takes the likeliest one."""


class HistogramsConfig(StrictModel):
    """Histograms of every weight and of the optimizer's running mean of its gradient, at each validation."""

    bins: int = Field(default=64, ge=2, le=128)
    """Of each histogram, between the least and the greatest value."""


class LeakMeterConfig(StrictModel):
    """How often the leak of planted canaries and of training rows is measured, and which exposure is too much."""

    every: int = Field(default=250, ge=1)
    """Steps between two measurements; the last step is measured too."""
    rows: int = Field(default=16, ge=2, le=4096)
    """Training rows, and as many held-out ones, that are told apart by their loss."""
    candidates: int = Field(default=63, ge=1, le=65535)
    """Texts that look like a canary and were never planted; exposure is at most log2 of one more."""
    max_exposure: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Bits of the most exposed canary above which `action` is taken."""
    action: Literal["warn", "stop"] = "warn"
    """An alarm in log and terminal; "stop" also ends the run."""

    @model_validator(mode="after")
    def _check_limit(self) -> Self:
        reachable = math.log2(self.candidates + 1)
        if self.max_exposure is not None and self.max_exposure >= reachable:
            raise ValueError(
                f"max_exposure = {self.max_exposure:g} bits, but {self.candidates} candidates show {reachable:g} at "
                "most; lower it, or raise candidates"
            )
        return self


class StabilityConfig(StrictModel):
    """The answer to a batch whose loss or gradient norm is far above the steps before it."""

    action: Literal["skip", "lower_rate", "roll_back"] = "skip"
    """`skip` gives the batch up; `lower_rate` applies it and the next steps at a lower learning rate; `roll_back` takes
    the weights back to the last checkpoint and passes all batches since then."""
    threshold: float = Field(default=6.0, gt=0.0, allow_inf_nan=False)
    """Robust z-score (distance from the median by 1.4826 times the median deviation) from which it is a spike."""
    window: int = Field(default=64, ge=16, le=100_000)
    """Applied steps that median and deviation are taken from; nothing is a spike before the first 16."""
    rate_factor: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Factor of the learning rate, with `lower_rate`."""
    rate_steps: int = Field(default=16, ge=1)
    """Steps at the lower rate, with `lower_rate`; a further spike among them begins them anew."""


class TrainConfig(StrictModel):
    """The length of the training, its batches, its objective and its seed."""

    steps: int = Field(default=0, ge=0)
    """Optimizer steps; 0, which is left out, where `epochs` says how long the training is."""
    epochs: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Passes over the training sequences, in place of `steps`."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    batch_size: int = Field(ge=1)
    """Sequences a step."""
    microbatches: int = Field(default=8, ge=1)
    """Equal parts of a batch, run one behind the other: pipelining and gradient accumulation at once."""
    max_failed_batches: int = Field(default=3, ge=0)
    """How many batches in a row may be given up because their loss or gradient is NaN or infinite; one more ends the
    run. Before one is, the owner itself redoes every stage: no stage can have a batch given up by lying."""
    precision: Literal["fp32", "bf16", "fp16", "bf16_weights"] = "fp32"
    """What matrix products are computed in while training; weights, moments and messages are in fp32 either way. With
    "bf16_weights" the stages of `[pipeline]` hold and compute everything in bf16, and update fp32 masters; ranks of
    `[parallel]` gather bf16 weights from fp32 shares, with zero 2 or 3."""
    numerics: Literal["float", "exact", "exact_fast"] = later_key("float")
    """The law of arithmetic: torch's own, whose bits depend on the processor; or fixed-point products and functions of
    single roundings, with the same bits everywhere: "exact" with float32's accuracy, "exact_fast" with bfloat16's."""
    objective: SingleObjective = "causal_lm"
    """What is learned: the next token; or the class of a text of `data.labelled`. Not all engines learn all of them. A
    table with ``kind`` and settings, where the objective has settings."""
    validate_every: int = Field(default=0, ge=0)
    """Steps between validations; 0 validates before the first step and after the last one only."""
    early_stopping: EarlyStoppingConfig | None = None
    """Ends the run when validation brings nothing any more."""
    samples: SamplesConfig | None = None
    """Texts that the model writes at each validation."""
    histograms: HistogramsConfig | None = later_key(None)
    """Histograms of weights and gradients at each validation; each takes as long as collecting a checkpoint."""
    stability: StabilityConfig | None = later_key(None)
    """What is done with batches that would throw the model off; left out, they are learned like all others."""
    neftune_alpha: float | None = later_key(None, gt=0.0, le=1000.0, allow_inf_nan=False)
    """Size of uniform noise on the embeddings while training, 5 to 15 for chats (NEFTune, Jain et al. 2023)."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    threads: int = Field(default=1, ge=1)
    """Threads of tensor kernels in each process."""

    @property
    def objective_kind(self) -> str:
        """Return the name of the objective, or the reference to it."""
        return kind_of(self.objective)

    @property
    def learns_pairs(self) -> bool:
        """Whether two rows of a batch belong together."""
        return self.objective_kind in OBJECTIVES and OBJECTIVES[self.objective_kind].target == "pair"

    @property
    def learns_from_texts(self) -> bool:
        """Whether texts that the model itself writes are learned from."""
        return isinstance(self.objective, RolloutSettings)

    @property
    def draws_per_step(self) -> int:
        """What a loader draws for a step: sequences, or pairs of them."""
        return self.batch_size // 2 if self.learns_pairs else self.batch_size

    def objection_to_pairs(self, has_pairs: bool, copies: int, cuts: int) -> str | None:
        """Say why pairs cannot be learned so, or are not there; None where all is well.

        Args:
            copies: Data parallel copies, which share out a batch.
            cuts: Ranks that share a row.
        """
        kind = self.objective_kind
        if self.learns_pairs != has_pairs:
            reason = "none is present" if self.learns_pairs else "the objective does not read preferences"
            return f'train.objective = "{kind}" and data.preferences belong together, but {reason}; change one of them'
        if not self.learns_pairs:
            return None
        parts = self.microbatches * copies
        if self.batch_size % (2 * parts):
            return (
                f"train.batch_size = {self.batch_size} rows are pairs, which {parts} microbatches would split; make "
                f"it a multiple of {2 * parts}"
            )
        if cuts > 1:
            return f'parallel.cp = {cuts} divides rows, but train.objective = "{kind}" needs whole rows; set it to 1'
        return None

    @property
    def length_text(self) -> str:
        """How long the training is, in words."""
        return f"{self.steps} steps" if self.epochs is None else f"{self.epochs:g} passes over the text"

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if bool(self.steps) == (self.epochs is not None):
            given = "both" if self.steps else "neither"
            raise RefusedKeyError(
                f"expected train.steps or train.epochs, found {given}; set one of them, at least 1 step",
                key="train.steps",
                found=given,
                expected="train.steps or train.epochs",
                do="set one of them, at least 1 step",
            )
        if self.early_stopping is not None and not self.validate_every:
            raise ValueError(
                "early_stopping decides after a validation, but validate_every = 0 has none before the last step; "
                "set validate_every"
            )
        if self.batch_size % self.microbatches:
            raise RefusedKeyError(
                f"batch_size = {self.batch_size} cannot be divided into microbatches = {self.microbatches} equal "
                "parts; make one a multiple of the other",
                key="train.batch_size",
                found=str(self.batch_size),
                expected=f"a multiple of train.microbatches = {self.microbatches}",
                do="make one a multiple of the other",
            )
        return self
