"""The base of every message between parties, and bounds of the values in them: numbers, digests, names, texts.

A value beyond these bounds is no mistake in computing: no honest party of any release sends it, so a party that
signs it convicts itself (`OutOfBoundsError`). A field that is unknown, missing or of another type may come from
another release, and convicts no party.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

from phalanx.config import printable_text
from phalanx.pipeline.config import MAX_STAGES
from phalanx.security.crypto import SESSION_NAME
from phalanx.transport import Body, SignedHeader

MAX_NORM_SQUARED = 1e84
"""A tensor's norm is a float32, so its square is below 1.2e77; that of millions of tensors together is below this."""

MAX_SECONDS = 1e10
"""Three hundred years of CPU time."""

Epoch = Annotated[int, Field(ge=0, lt=2**31)]
Step = Annotated[int, Field(ge=0, lt=2**40)]
Stage = Annotated[int, Field(ge=0, lt=MAX_STAGES)]
Microbatch = Annotated[int, Field(ge=0, lt=2**20)]
Size = Annotated[int, Field(ge=0, lt=2**53)]
"""Of a transfer or a place in it, in bytes."""
OrderNumber = Annotated[int, Field(ge=0, lt=2**53)]
RequestNumber = Annotated[int, Field(ge=0, lt=2**53)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
GradientDigest = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
"""A gradient's digest; empty where gradients are not compared: in a run without a guard."""
WeightsDigest = Annotated[str, Field(pattern=r"^([0-9a-f]{64}){1,2}$")]
"""That of the frozen weights, where there are any, before that of the trained ones."""
NormSquared = Annotated[float, Field(ge=0.0, le=MAX_NORM_SQUARED)]
Seconds = Annotated[float, Field(ge=0.0, le=MAX_SECONDS)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
PartyName = Annotated[str, Field(pattern=f"^{SESSION_NAME}$")]
StageName = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,4})$")]
"""A stage's number where JSON has room for text only; one spelling each."""
Address = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:%\[\]-]{1,261}$")]
Label = Annotated[str, Field(pattern=r"^[ -~]{0,64}$")]
Words = Annotated[str, AfterValidator(printable_text)]
"""What a party says for people to read: cut off and made harmless where it is read."""
Header = Annotated[str, Field(max_length=2**20)]
"""A header as long as a frame's own can be; the code that opens it checks what it holds."""
Pem = Annotated[str, Field(max_length=2**16)]

MAX_HEADERS = 2**12
"""That a message passes on: more do not fit into a frame's header."""
MAX_PLACES = 2**15
"""That a message lists, likewise."""
MAX_PARTIES = 2**10


class Message(Body):
    """A message between parties of a verified pipeline."""

    epoch: Epoch
    """Rises by one whenever the assignment changes; what belongs to an older epoch is dropped."""


@dataclass(frozen=True)
class ReceivedMessage:
    """A message and the frame that carried it; `header` is None for the owner's messages to itself."""

    sender: str
    message: Message
    payload: memoryview
    header: SignedHeader | None
