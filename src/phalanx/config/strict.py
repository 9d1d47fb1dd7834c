"""The one base class of every config: unknown keys, wrong types and later changes are errors."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Frozen data; validation is strict and refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)
