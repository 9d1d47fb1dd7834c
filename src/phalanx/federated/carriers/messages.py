"""Orders of the owner and replies of a site, within bounds; tensors and secure sums follow as a payload."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from phalanx.transport import Body, bodies_by_kind

Round = Annotated[int, Field(ge=1, lt=2**53)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
MAX_LOSS = 1e9
Loss = Annotated[float, Field(ge=-MAX_LOSS, le=MAX_LOSS, allow_inf_nan=False)]
SumPhaseName = Literal[
    "join", "share", "mask", "consent", "release", "key", "encrypt", "check", "open", "attest", "seal"
]
FaultReason = Literal["not_finite", "refused", "failed", "budget_spent"]


class SiteOrder(Body):
    """An order of the owner; the reply names its `ticket`, which is given once in a session."""

    ticket: Count


class TrainOrder(SiteOrder, kind="train"):
    """Train a round from the weights in the payload.

    Attributes:
        counted: The last round in which an update of this site has counted; 0 for none.
    """

    round: Round
    model: Digest
    rate: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
    counted: Count


class SumOrder(SiteOrder, kind="sum"):
    """Take a phase of the secure sum of a round's updates; the payload is the owner's message of that phase.

    Attributes:
        number: Number of the sum; each is entered once.
    """

    round: Round
    model: Digest
    number: Round
    phase: SumPhaseName


class MeasureOrder(SiteOrder, kind="measure"):
    """Measure the weights in the payload on the site's own held-out rows."""


class EndOrder(SiteOrder, kind="end"):
    """The run is over."""


class SiteReply(Body):
    """A site's reply to the order of a ticket."""

    ticket: Count


class TrainedReply(SiteReply, kind="trained"):
    """A round is trained.

    Attributes:
        header: Signed header of the update, whose values are the payload. Empty where updates are summed, and stay.
        loss: Mean over the round's targets; None where a site tells nothing but noisy sums.
        num_targets: Targets of the round; 0 where a site does not report them.
        scaled: Factor of the update to stay within the norm; None where a site does not report it.
        train_s: Wall-clock seconds of the local training.
        epsilon: Epsilon that its private rows have spent, by its own report; None where rows are not private.
        rounds_left: Further rounds that its own budget pays for; None likewise.
    """

    header: Annotated[str, Field(max_length=4096)] = ""
    loss: Loss | None
    num_targets: Annotated[int, Field(ge=0, lt=2**31)]
    samples: Annotated[int, Field(ge=1, lt=2**31)]
    scaled: Annotated[float, Field(gt=0.0, le=1.0)] | None
    train_s: Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
    epsilon: Annotated[float, Field(ge=0.0, le=1000.0)] | None = None
    rounds_left: Count | None = None

    @model_validator(mode="after")
    def _tells_of_targets_or_nothing(self) -> Self:
        if (self.loss is None) is not (self.num_targets == 0):
            raise ValueError("loss: expected a number with targets, null without targets")
        if (self.epsilon is None) is not (self.rounds_left is None):
            raise ValueError("epsilon: expected together with the number of rounds left")
        return self


class SumReply(SiteReply, kind="summed"):
    """A phase of a secure sum; its message is the payload, but for masked values, which are one themselves.

    Attributes:
        message: The signed statement beside masked values; empty in other phases.
    """

    message: Annotated[str, Field(max_length=4096)] = ""


class MeasuredReply(SiteReply, kind="measured"):
    """A site's scores on its held-out rows; as `SiteScores` has them, in counts that rows can have."""

    loss: Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
    num_targets: Count
    classes: Annotated[tuple[tuple[Count, Count, Count], ...], Field(max_length=1000)] = ()

    @model_validator(mode="after")
    def _of_some_rows(self) -> Self:
        true, taken = (sum(counts[place] for counts in self.classes) for place in (0, 1))
        if self.classes and not true == taken == self.num_targets:
            raise ValueError("classes: the numbers of texts do not add up to the number of targets")
        if any(right > min(of_it, taken_for_it) for of_it, taken_for_it, right in self.classes):
            raise ValueError("classes: a class has more right texts than texts")
        return self


class SiteFault(SiteReply, kind="fault"):
    """A site cannot fulfil an order; the reason is one word, since texts of errors may quote its data.

    Attributes:
        reason: One word of a closed list.
        culprit: The site that signed a part of a secure sum which it refused; empty where there is none.
    """

    reason: FaultReason
    culprit: Annotated[str, Field(pattern=r"^([a-z0-9][a-z0-9-]{0,62})?\z")] = ""


ORDERS: dict[str, type[SiteOrder]] = bodies_by_kind((TrainOrder, SumOrder, MeasureOrder, EndOrder))
REPLIES: dict[str, type[SiteReply]] = bodies_by_kind((TrainedReply, SumReply, MeasuredReply, SiteFault))
