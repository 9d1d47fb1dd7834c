"""The one base class of every config: unknown keys, wrong types, NaN and later changes are errors."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Frozen data; validation is strict and refuses unknown keys, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False)
