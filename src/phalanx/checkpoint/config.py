"""How often a run is saved, and how many checkpoints are kept."""

from pydantic import Field, field_validator

from phalanx.config import StrictModel


class CheckpointConfig(StrictModel):
    """The ``[checkpoint]`` section.

    Attributes:
        every: Steps between two checkpoints; 0 saves only at the end of the run.
        keep: Checkpoints that are kept, newest first; at least 1.
        encrypt: Encryption at rest; not yet available.
        asynchronous: Writing beside the training; not yet available.
    """

    every: int = Field(default=50, ge=0)
    keep: int = Field(default=2, ge=1)
    encrypt: bool = False
    asynchronous: bool = False

    @field_validator("encrypt", "asynchronous")
    @classmethod
    def _refuse_what_is_missing(cls, value: bool) -> bool:
        # a run that asks for encryption must not silently write plain tensors
        if value:
            raise ValueError("not yet available; set it to false or leave it out")
        return value
