"""The bodies of all frames between the owner of rollouts and its workers."""

from typing import Annotated

from pydantic import Field

from phalanx.pipeline.protocol.message import Digest, Size, Words
from phalanx.rollouts.request import RolloutRequest
from phalanx.rollouts.rollout import RolloutAnswer
from phalanx.transport import Body, bodies_by_kind

MAX_POLICY_BYTES = 2**36


class PolicyOffer(Body, kind="policy_offer"):
    """The weights of a policy follow, as one safetensors file in parts.

    Attributes:
        policy: `RolloutPolicy.full_digest`; the worker computes it again.
    """

    policy: Digest
    config: Annotated[str, Field(max_length=2**18)]
    size_bytes: Annotated[int, Field(ge=1, le=MAX_POLICY_BYTES)]


class PolicyPart(Body, kind="policy_part"):
    """A part of that file; the payload has its bytes."""

    policy: Digest
    offset: Size


class RolloutRefusal(Body, kind="rollout_refusal"):
    """A worker cannot answer a request; that convicts it of nothing."""

    request: Digest
    reason: Words


class RolloutsEnd(Body, kind="rollouts_end"):
    """The owner needs no further texts."""


TO_WORKER = bodies_by_kind((PolicyOffer, PolicyPart, RolloutRequest, RolloutsEnd))
TO_OWNER = bodies_by_kind((RolloutAnswer, RolloutRefusal))
