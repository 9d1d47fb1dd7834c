"""The section ``[split.admission]``: which clients an enclave learns from, and how one gradient comes of theirs."""

from typing import Literal, Self

from pydantic import Field, model_validator

from phalanx.config import StrictModel

RefusalReason = Literal["not_finite", "over_norm", "far", "held_out_loss"]
"""Why a client's microbatches of a step do not count."""


class ClientAdmissionConfig(StrictModel):
    """Checks of each client's gradient before it counts, and the rule that makes one of all.

    Attributes:
        rule: "mean", over all targets as without this section; or a robust rule, in which every client counts the same.
        byzantine: Clients that may lie; the rule must stand so many, and no more are ever shut out for distance.
        momentum: Share of a client's earlier gradients that a robust rule adds before it compares: randomness evens
            out, a constant bias stays.
        max_norm: Bound of the norm of a client's mean gradient in a step; one that is larger does not count.
        held_out_factor: A client's mean loss on its own held-out texts may be so many times the middle one of all
            clients; while it is larger, the client's microbatches do not count.
        far: A client's gradient is far when its distance to the result is this many times the median distance, with a
            robust rule.
        patience: A client is shut out for the rest of the run when it was refused for one reason, or far, so many times
            in a row: in steps that asked it, of held-out losses in measurements.
    """

    rule: Literal[
        "mean",
        "median",
        "trimmed_mean",
        "krum",
        "multi_krum",
        "geometric_median",
        "centered_clipping",
        "mda",
        "caf",
    ] = "mean"
    byzantine: int = Field(default=0, ge=0)
    momentum: float = Field(default=0.9, ge=0.0, lt=1.0)
    max_norm: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    held_out_factor: float | None = Field(default=None, gt=1.0, allow_inf_nan=False)
    far: float = Field(default=2.0, gt=1.0, allow_inf_nan=False)
    patience: int = Field(default=3, ge=1)

    @model_validator(mode="after")
    def _check_rule(self) -> Self:
        if (self.rule == "mean") != (self.byzantine == 0):
            raise ValueError(
                f'rule = "{self.rule}" with byzantine = {self.byzantine}: a mean tolerates no lying client; set '
                "byzantine with a robust rule, or remove both"
            )
        return self
