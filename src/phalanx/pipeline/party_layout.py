"""The layout of one party's ranks, in the terms of ``[parallel]``; impossible layouts are refused here."""

from typing import Any, Literal

from pydantic import Field, model_validator

from phalanx.config import StrictModel
from phalanx.models.config import AdapterConfig, LoraConfig, PromptEncoderConfig

_ALL_PARAMETERS = 3
"""The ZeRO level at which parameters are shared as well."""

NOT_FOR_PARTIES = {
    "pp": "the stages of the run are its pipeline; raise pipeline.stages and assign more stages to the party",
    "schedule": "it orders the microbatches of a pipeline; use pipeline.schedule",
    "replicas": "it groups copies to save traffic between machines, but a party is on one machine",
    "gradient_compression": "the party signs the sum itself, which its shadow recomputes",
    "offload": "rank 0 has the stage on the device of the worker file",
    "activation_checkpointing": "it is a key of the run: model.activation_checkpointing",
    "compile": "compiled blocks compute other bits than an auditor",
    "outer": "copies that train separately have no common state to sign after a step",
    "min_dp": "a party has a fixed number of ranks, and its shadow takes over when it is lost",
    "max_dp": "a party has a fixed number of ranks, and its shadow takes over when it is lost",
    "restarts": "a party that loses a rank is lost as a whole; pipeline.respawns or pipeline.returns replace it",
    "unsafe_public_network": "the ranks of a party are processes of one machine",
}
"""Words of ``[parallel]`` that a party's layout cannot have, and why."""


class PartyLayout(StrictModel):
    """How the ranks of one party share its stages.

    Attributes:
        dp: Ranks that each run some of a microbatch's rows.
        tp: Ranks that share every matrix product.
        cp: Ranks that share every sequence.
        context: How ranks see the whole context, as in ``[parallel]``.
        zero: What ranks shard: 0 nothing, 1 optimizer state and undo states, 2 weight gradients too while they add up.
        sequence_parallel: Tensor parallel ranks share the sequence too, where they would do the same work.
        silence_s: Seconds after which a rank that gives no sign of life is taken for hung.
    """

    dp: int = Field(default=1, ge=1, le=1024)
    tp: int = Field(default=1, ge=1, le=1024)
    cp: int = Field(default=1, ge=1, le=1024)
    context: Literal["ulysses", "ring"] = "ulysses"
    zero: int = Field(default=0, ge=0, le=_ALL_PARAMETERS)
    sequence_parallel: bool = False
    silence_s: float = Field(default=30.0, ge=2.0)

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_words(cls, data: Any) -> Any:
        for word in NOT_FOR_PARTIES if isinstance(data, dict) else ():
            if word in data:
                raise ValueError(
                    f"{word} is not allowed for the ranks of one party: {NOT_FOR_PARTIES[word]}; remove it"
                )
        return data

    @model_validator(mode="after")
    def _check_layout(self) -> "PartyLayout":
        if self.zero == _ALL_PARAMETERS:
            raise ValueError(
                "zero = 3 divides parameters, but rank 0 of a party needs all of them to sign whole weights; set "
                "zero to 2"
            )
        if self.zero and self.num_copies == 1:
            raise ValueError(
                f"zero = {self.zero} divides the state of dp * cp copies, but there is one copy; raise dp, or "
                "set zero to 0"
            )
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel = true needs tensor parallel ranks; set tp to 2 or more, or cp instead")
        return self

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return self.dp * self.tp * self.cp

    @property
    def num_copies(self) -> int:
        """How many ranks have the same weights."""
        return self.dp * self.cp

    @property
    def short_description(self) -> str:
        """The layout in a few words; empty for one rank."""
        settings = {axis: getattr(self, axis) for axis in ("dp", "tp", "cp") if getattr(self, axis) > 1}
        if self.cp > 1 and self.context != "ulysses":
            settings["context"] = self.context
        if self.zero:
            settings["zero"] = self.zero
        if self.sequence_parallel:
            settings["sequence_parallel"] = "true"
        return " ".join(f"{word}={value}" for word, value in settings.items())


def unshared_adapter(adapter: AdapterConfig | None) -> str | None:
    """Say why the ranks of a party cannot share a stage beside this adapter; None where they can."""
    if isinstance(adapter, PromptEncoderConfig):
        return (
            f'model.adapter.kind = "{adapter.kind}": later stages have nothing to train that ranks of a party could '
            "divide; give each party one process"
        )
    if isinstance(adapter, LoraConfig) and adapter.quantize is not None:
        return (
            f'model.adapter.quantize = "{adapter.quantize}": packed matrices are not supported with ranks of a '
            "party; remove it, or give each party one process"
        )
    if isinstance(adapter, LoraConfig) and adapter.dropout:
        return (
            f"model.adapter.dropout = {adapter.dropout}: ranks with a part of the rows, heads or positions drop "
            "other numbers than a whole stage; set it to 0, or give each party one process"
        )
    return None
