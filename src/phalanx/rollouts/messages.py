"""The bodies of all frames between the owner of rollouts and its workers."""

from typing import Annotated, ClassVar

from pydantic import Field

from phalanx.pipeline.protocol.message import Digest, Size, Words
from phalanx.rollouts.request import RolloutRequest
from phalanx.rollouts.rollout import RolloutAnswer
from phalanx.transport import Body, bodies_by_kind

MOST_POLICY_BYTES = 2**36


class PolicyOffer(Body):
    """The weights of a policy follow, as one safetensors file in parts.

    Attributes:
        policy: `RolloutPolicy.full_digest`; the worker computes it again.
    """

    kind: ClassVar[str] = "policy_offer"

    policy: Digest
    config: Annotated[str, Field(max_length=2**18)]
    size_bytes: Annotated[int, Field(ge=1, le=MOST_POLICY_BYTES)]


class PolicyPart(Body):
    """A part of that file; the payload has its bytes."""

    kind: ClassVar[str] = "policy_part"

    policy: Digest
    offset: Size


class RolloutRefusal(Body):
    """A worker cannot answer a request; that convicts it of nothing."""

    kind: ClassVar[str] = "rollout_refusal"

    request: Digest
    reason: Words


class RolloutsEnd(Body):
    """The owner needs no further texts."""

    kind: ClassVar[str] = "rollouts_end"


TO_WORKER = bodies_by_kind((PolicyOffer, PolicyPart, RolloutRequest, RolloutsEnd))
TO_OWNER = bodies_by_kind((RolloutAnswer, RolloutRefusal))
