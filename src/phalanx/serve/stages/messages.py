"""The bodies of all frames between an owner that serves a model and the parties of its stages, with their digests."""

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from phalanx.config import StrictModel, canonical_json
from phalanx.pipeline.protocol.message import Digest, OrderNumber, Size, Words
from phalanx.security.crypto import digest_hex, in_domain
from phalanx.transport import Body, bodies_by_kind
from phalanx.transport.tensors import tensor_buffers

MAX_POSITION = 1 << 24
MAX_PIECES = 1 << 11
"""Of one step; their header has to fit into a frame."""
MAX_WEIGHT_BYTES = 2**44

_TEXT, _PIECE = "stage-text/1", "stage-piece/1"
Position = Annotated[int, Field(ge=0, lt=MAX_POSITION)]
Layer = Annotated[int, Field(ge=0, le=10**5)]


class StageOffer(Body):
    """The weights of a stage follow, as one safetensors file in parts.

    Attributes:
        config: The hub's config.json of the whole model.
        weights: Digest of the stage's weights; the party computes it again.
        tolerance: Largest distance by which the party will be judged.
        max_texts: Texts that the owner has open at the same time, at most.
        max_tokens: Tokens of all these texts together, at most.
    """

    kind: ClassVar[str] = "stage_offer"

    config: Annotated[str, Field(max_length=2**18)]
    first_layer: Layer
    end_layer: Layer
    weights: Digest
    size_bytes: Annotated[int, Field(ge=1, le=MAX_WEIGHT_BYTES)]
    tolerance: Annotated[float, Field(gt=0.0, le=0.1)]
    max_texts: Annotated[int, Field(ge=1, le=2**20)]
    max_tokens: Annotated[int, Field(ge=1, le=2**30)]

    @property
    def digest(self) -> str:
        """Names the stage, its weights and its tolerance."""
        return digest_hex(canonical_json(self.model_dump(mode="json")))


class StageFilePart(Body):
    """A part of that file; the payload has its bytes."""

    kind: ClassVar[str] = "stage_part"

    offer: Digest
    offset: Size


class StageReady(Body):
    """The party holds the weights of an offer, and computes by them from now on."""

    kind: ClassVar[str] = "stage_ready"

    offer: Digest


class TokenPiece(StrictModel):
    """Consecutive tokens of one text.

    Attributes:
        text: Number of the text at this party; no number is given twice in a session.
        start: Position of the first token.
    """

    text: OrderNumber
    start: Position
    length: Annotated[int, Field(ge=1, lt=MAX_POSITION)]


class SignedTokenPiece(TokenPiece):
    """A piece that was computed.

    Attributes:
        link: Digest over this piece's inputs and outputs and all earlier pieces of the text, see `next_link`.
    """

    link: Digest


class StageStep(Body):
    """Hidden states to run through the stage; the payload has them in float32, piece behind piece.

    Attributes:
        order: Number of the step at this party, from 0.
        closed: Texts of which nothing further comes.
    """

    kind: ClassVar[str] = "stage_step"

    offer: Digest
    order: OrderNumber
    pieces: Annotated[tuple[TokenPiece, ...], Field(min_length=1, max_length=MAX_PIECES)]
    closed: Annotated[tuple[OrderNumber, ...], Field(max_length=MAX_PIECES)] = ()


class StageAnswer(Body):
    """What came out; the payload has it in the form of the inputs.

    Attributes:
        step: Digest of the header with which the owner signed the step.
    """

    kind: ClassVar[str] = "stage_answer"

    offer: Digest
    order: OrderNumber
    step: Digest
    pieces: Annotated[tuple[SignedTokenPiece, ...], Field(max_length=MAX_PIECES)]


class StageRefusal(Body):
    """A party does not load an offer or answer a step; that convicts it of nothing."""

    kind: ClassVar[str] = "stage_refusal"

    reason: Words


class StagesEnd(Body):
    """The owner ends."""

    kind: ClassVar[str] = "stages_end"


TO_HOLDER = bodies_by_kind((StageOffer, StageFilePart, StageStep, StagesEnd))
TO_SERVER = bodies_by_kind((StageReady, StageAnswer, StageRefusal))


def first_link(offer: str, text: int) -> str:
    """Return the link before the first piece of a text."""
    return digest_hex(in_domain(_TEXT, canonical_json([offer, text])))


def next_link(link: str, start: int, inputs: str, outputs: str) -> str:
    """Chain one piece to the earlier ones.

    Args:
        link: Link of the piece before.
        start: Position of the first token.
        inputs: Digest of the hidden states that went in.
    """
    return digest_hex(in_domain(_PIECE, canonical_json([link, start, inputs, outputs])))


def states_digest(states: Tensor) -> str:
    """Return the digest of hidden states ``[tokens, dim]``."""
    return digest_hex(tensor_buffers(states.contiguous()))
