"""The leaves of a step's Merkle tree: what the owner writes down of an applied step, and what a verifier reads."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from phalanx.config import StrictModel, canonical_json
from phalanx.errors import AuditLogError
from phalanx.pipeline.protocol.messages import PassedOnHeader
from phalanx.planner.schedules import Direction

Stage = Annotated[int, Field(ge=0)]


class AttemptLeaf(StrictModel):
    """The attempt that was applied.

    Attributes:
        session: Name of the session, which every signed header has.
        step: The step.
        epoch: The attempt's epoch, which the draws depend on.
        stages: Holder and shadow of each stage, by its number.
        lanes: 1; it was 2 where both copies of a stage served, which ADR 70 has removed.
        classes: Numeric class of each party that is not of the owner's, as a number from 1: the bits of two classes
            cannot be compared.
        clip: What every gradient was multiplied with.
        frozen: Stages that took no update.
    """

    leaf: Literal["attempt"] = "attempt"
    session: str
    step: int = Field(ge=0)
    epoch: int = Field(ge=0)
    stages: dict[str, tuple[str, str | None]]
    lanes: Literal[1] = 1
    classes: dict[str, int]
    clip: float
    frozen: tuple[Stage, ...]


class CommitLeaf(StrictModel):
    """A commitment: digest of the signed header, None where the owner committed to itself."""

    leaf: Literal["commit"] = "commit"
    stage: Stage
    lane: Literal[0] = 0
    party: str
    header: str | None
    gradient: str
    norm_squared: float | None


class StateLeaf(StrictModel):
    """The state of a stage at the beginning of the step, as holder and shadow agreed on it."""

    leaf: Literal["state"] = "state"
    stage: Stage
    weights: str
    moments: str


class DrawLeaf(StrictModel):
    """A draw: what one auditor was asked to recompute; `whole`: the weight gradient as well."""

    leaf: Literal["draw"] = "draw"
    stage: Stage
    auditor: str
    microbatches: tuple[Stage, ...]
    whole: bool


class OwnerAuditLeaf(StrictModel):
    """The owner redid all of a stage's step."""

    leaf: Literal["owner_audit"] = "owner_audit"
    stage: Stage


class AuditLeaf(StrictModel):
    """One recomputed microbatch.

    Attributes:
        stage: Its stage.
        microbatch: Its number.
        auditor: The party that recomputed it.
        report: The header that the auditor signed; None where it was the owner.
        digests: What the owner got, by direction; None where `report` says it.
        outputs: Headers under which the stage sent its activation and its gradient; None where it sent none.
    """

    leaf: Literal["audit"] = "audit"
    stage: Stage
    microbatch: Stage
    auditor: str
    report: PassedOnHeader | None
    digests: dict[Direction, str] | None
    outputs: tuple[PassedOnHeader | None, PassedOnHeader | None]


class StepAuditLeaf(StrictModel):
    """One recomputed weight gradient, beside the commitment that it was compared with; else as `AuditLeaf`."""

    leaf: Literal["step_audit"] = "step_audit"
    stage: Stage
    lane: Literal[0] = 0
    auditor: str
    report: PassedOnHeader | None
    gradient: str | None
    norm_squared: float | None
    commit: PassedOnHeader | None


Leaf = AttemptLeaf | CommitLeaf | StateLeaf | DrawLeaf | OwnerAuditLeaf | AuditLeaf | StepAuditLeaf

_LEAF: TypeAdapter[Leaf] = TypeAdapter(Annotated[Leaf, Field(discriminator="leaf")])


def write_leaf(leaf: Leaf) -> bytes:
    """Encode one leaf."""
    return canonical_json(leaf.model_dump(mode="json"))


def read_leaves(leaves: Sequence[bytes]) -> list[Leaf]:
    """Read the leaves of one step.

    Raises:
        AuditLogError: One is malformed.
    """
    try:
        return [_LEAF.validate_json(leaf) for leaf in leaves]
    except ValidationError as exc:
        first = exc.errors(include_input=False)[0]
        raise AuditLogError(f"a leaf is malformed: {'.'.join(map(str, first['loc']))}: {first['msg']}") from exc
