"""What every message of a split is made of: bounded texts, counts and sizes."""

from typing import Annotated

from pydantic import Field

from phalanx.transport import Body

Text = Annotated[str, Field(max_length=500)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Size = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
"""Of a party."""


class SplitMessage(Body):
    """A message between the enclave and its parties."""
