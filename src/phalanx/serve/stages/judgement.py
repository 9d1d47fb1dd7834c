"""The one judge of served stages: from signed records and a control run to at most one guilty certificate.

The owner and every reader of evidence call the same function on the same records; distances are weighed by the judge
of the pipeline, `weigh_message`.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic import Field
from torch import Tensor, float32

from phalanx.config import StrictModel
from phalanx.errors import EvidenceError, FrameError, ModelError, SignatureError
from phalanx.models import weights_digest
from phalanx.pipeline.evidence.weighing import Limit, MessageClaim, weigh_message
from phalanx.pipeline.protocol.message import Digest, OrderNumber, PartyName
from phalanx.pipeline.protocol.signed import StatementReader, to_signed
from phalanx.pipeline.tolerance.distance import distance_to_truth
from phalanx.rollouts.bundle import digest_of_answer
from phalanx.security.crypto import Peer, digest_hex
from phalanx.serve.stages.blocks import StageBlocks, cut_pieces
from phalanx.serve.stages.messages import (
    TO_HOLDER,
    TO_SERVER,
    Position,
    StageAnswer,
    StageOffer,
    StageStep,
    first_link,
    next_link,
    states_digest,
)
from phalanx.transport import SignedHeader, parse_body
from phalanx.transport.tensors import tensor_from

StageOffence = Literal["message", "form", "equivocation"]
"""What a party can be convicted of, all of it by records that it signed:

- message: hidden states that its weights do not give for the inputs that it signed
- form: an answer whose digests are not of the bytes that came with it, or that has other pieces than were asked for
- equivocation: two different answers to one step
"""


class StageVerdict(StrictModel):
    """One party is guilty; `reason` names the place, the measured and the allowed value.

    Attributes:
        start: Position of the first token of the piece that is off.
        measured: None where it is no finite number or nothing was measured.
    """

    party: PartyName
    first_layer: int = Field(ge=0)
    offence: StageOffence
    reason: str
    text: OrderNumber | None = None
    start: Position | None = None
    measured: float | None = None
    allowed: float | None = None
    evidence: str | None = None
    evidence_sha256: str | None = None


class PieceRecord(StrictModel):
    """A piece of a text by the digest of its outputs."""

    start: Position
    length: int = Field(ge=1)
    outputs: Digest


@dataclass(frozen=True)
class StageBundle:
    """The records that a verdict rests on, all of it.

    Attributes:
        offer: The owner's header of the stage's offer to this party.
        answer: The party's header of the answer that is looked at.
        step: The owner's header of the step that it answers.
        previous: Headers of the answers before, one for each text of the step that goes on.
        text: Number of the accused text at this party.
        pieces: Of that text, up to the accused one.
        inputs: Their hidden states, ``[tokens, dim]``.
        output: What came out of the last of them, ``[tokens, dim]``.
        weights: Of the stage, by the hub's names.
        sent: Payload of the step, where the form of the answer is accused.
        received: Payload of the answer, likewise.
    """

    party: str
    offer: SignedHeader
    answer: SignedHeader
    step: SignedHeader | None = None
    second_answer: SignedHeader | None = None
    previous: Sequence[SignedHeader] = ()
    text: int | None = None
    pieces: Sequence[PieceRecord] = ()
    inputs: Tensor | None = None
    output: Tensor | None = None
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    sent: bytes = b""
    received: bytes = b""

    @property
    def headers(self) -> dict[str, SignedHeader]:
        """Every header by its role."""
        roles = {
            "offer": self.offer,
            "answer": self.answer,
            "step": self.step,
            "second_answer": self.second_answer,
            **{f"previous_{number}": header for number, header in enumerate(self.previous)},
        }
        return {role: header for role, header in roles.items() if header is not None}


class _Opened(NamedTuple):
    offer: StageOffer
    answer: StageAnswer
    owner: str
    statements: StatementReader


def judge_stage_bundle(bundle: StageBundle, session: str, peer: Callable[[str], Peer]) -> StageVerdict | None:
    """Judge a party by records that it signed.

    Args:
        session: Name that every header must bear.
        peer: Key of a party of the session; raises `PeerRefusedError` for any other name.

    Raises:
        EvidenceError: The records belong to another party, step or text, or differ from the signed ones.

    Guarantees:
        Convicts nobody whose hidden states are within the tolerance of a control run of the very pieces, in the order
        and with the cache in which the party ran them, by weights and inputs under the party's own signature.
    """
    statements = StatementReader(session, peer)
    owner = bundle.offer.fields.sender
    offer = _open_header(statements, bundle.offer, (owner, bundle.party), StageOffer)
    answer = _open_header(statements, bundle.answer, (bundle.party, owner), StageAnswer)
    opened = _Opened(offer, answer, owner, statements)
    if bundle.second_answer is not None:
        return _judge_second(bundle, opened)
    if answer.offer != offer.digest:
        raise EvidenceError("the answer is of another stage than the offer")
    return _judge_form(bundle, opened) if bundle.step is not None else _judge_message(bundle, opened)


def _judge_second(bundle: StageBundle, opened: _Opened) -> StageVerdict | None:
    if bundle.second_answer is None:
        return None
    second = _open_header(opened.statements, bundle.second_answer, (bundle.party, opened.owner), StageAnswer)
    if second.step != opened.answer.step:
        raise EvidenceError("the two answers are to two steps")
    if digest_of_answer(bundle.answer) == digest_of_answer(bundle.second_answer):
        return None
    reason = f"signed two different answers to step {second.order}"
    return StageVerdict(party=bundle.party, first_layer=opened.offer.first_layer, offence="equivocation", reason=reason)


def _judge_form(bundle: StageBundle, opened: _Opened) -> StageVerdict | None:
    """Compare an answer with its step and with the bytes of both."""
    if bundle.step is None:
        return None
    step = _open_header(opened.statements, bundle.step, (opened.owner, bundle.party), StageStep)
    for header, payload in ((bundle.step, bundle.sent), (bundle.answer, bundle.received)):
        if digest_hex(payload) != header.fields.payload_digest:
            raise EvidenceError(f"a payload is not the one that {header.fields.sender} signed")
    if (opened.answer.step, step.offer) != (bundle.step.header_digest, opened.offer.digest):
        raise EvidenceError("the answer is to another step")
    links = _read_links(bundle, opened, step)
    fault = find_form_fault(step, opened.answer, bundle.sent, bundle.received, links)
    if fault is None:
        return None
    return StageVerdict(
        party=bundle.party,
        first_layer=opened.offer.first_layer,
        offence="form",
        reason=f"step {step.order}: {fault}",
    )


def _read_links(bundle: StageBundle, opened: _Opened, step: StageStep) -> dict[int, str]:
    """Return the link that the party has signed for each text of a step before it."""
    links = {piece.text: first_link(step.offer, piece.text) for piece in step.pieces if piece.start == 0}
    for header in bundle.previous:
        before = _open_header(opened.statements, header, (bundle.party, opened.owner), StageAnswer)
        if before.offer != step.offer or before.order >= step.order:
            raise EvidenceError("an earlier answer is of another stage, or a later one")
        ends = {piece.text: piece for piece in before.pieces}
        for piece in step.pieces:
            signed = ends.get(piece.text)
            if piece.text not in links and signed is not None and signed.start + signed.length == piece.start:
                links[piece.text] = signed.link
    if any(piece.text not in links for piece in step.pieces):
        raise EvidenceError("an earlier answer is missing")
    return links


def find_form_fault(
    step: StageStep, answer: StageAnswer, sent: bytes, received: bytes, links: Mapping[int, str]
) -> str | None:
    """Return what no honest party signs as an answer to a step, whatever its weights; None where there is nothing.

    Args:
        links: Link of each text before this step.
    """
    places = [(piece.text, piece.start, piece.length) for piece in step.pieces]
    if [(piece.text, piece.start, piece.length) for piece in answer.pieces] != places or answer.order != step.order:
        return "its pieces are not those that were asked for"
    if len(received) != len(sent):
        return f"it has {len(received)} bytes, expected {len(sent)}"
    lengths = [piece.length for piece in step.pieces]
    shape = (sum(lengths), len(sent) // 4 // max(1, sum(lengths)))
    inputs = cut_pieces(tensor_from(sent, float32, shape), lengths)
    outputs = cut_pieces(tensor_from(received, float32, shape), lengths)
    links = dict(links)
    for piece, x, y in zip(answer.pieces, inputs, outputs, strict=True):
        links[piece.text] = next_link(links[piece.text], piece.start, states_digest(x), states_digest(y))
        if piece.link != links[piece.text]:
            return f"text {piece.text}, token {piece.start}: its digest is not of the bytes that went in and came out"
    return None


def _judge_message(bundle: StageBundle, opened: _Opened) -> StageVerdict | None:
    """Redo the pieces of one text as the party did them: one behind the other, with a cache."""
    inputs, output = bundle.inputs, bundle.output
    if inputs is None or output is None or not bundle.pieces or bundle.text is None:
        raise EvidenceError("the hidden states are missing")
    if any(states.dtype != float32 or states.dim() != 2 for states in (inputs, output)):
        # a digest is of bytes: the same ones in another form are other numbers
        raise EvidenceError("hidden states are shown in another form than float32 [tokens, dim]")
    offer, last = opened.offer, bundle.pieces[-1]
    link = first_link(offer.digest, bundle.text)
    try:
        parts = cut_pieces(inputs, [piece.length for piece in bundle.pieces])
    except FrameError as exc:
        raise EvidenceError(f"the inputs are not those of the pieces: {exc}") from exc
    for piece, part in zip(bundle.pieces, parts, strict=True):
        link = next_link(link, piece.start, states_digest(part), piece.outputs)
    if all((piece.text, piece.link) != (bundle.text, link) for piece in opened.answer.pieces):
        raise EvidenceError(f"inputs and outputs are not those that {bundle.party} signed")
    if states_digest(output) != last.outputs:
        raise EvidenceError("the output is not the one of the last piece")
    if weights_digest(bundle.weights.items()) != offer.weights:
        raise EvidenceError("the weights are not those of the offer")
    try:
        blocks = StageBlocks.build(json.loads(offer.config), (offer.first_layer, offer.end_layer), bundle.weights)
    except (ModelError, ValueError) as exc:
        raise EvidenceError(f"the stage cannot be built: {exc}") from exc
    if {inputs.shape[1], output.shape[1]} != {blocks.width}:
        raise EvidenceError(f"hidden states are shown in another form than {blocks.width} numbers a token")
    text = blocks.open_text()
    truth = output
    for part in parts:
        truth = blocks.extend([(text, len(part))], part)
    claim = MessageClaim(bundle.party, last.outputs, output[None], Limit(offer.tolerance))
    finding = weigh_message(truth[None], claim, None)
    if finding is None:
        return None
    distance = finding.distance if finding.distance is not None and math.isfinite(finding.distance) else None
    shown = "no number" if distance is None else f"{distance:.1e}"
    return StageVerdict(
        party=bundle.party,
        first_layer=offer.first_layer,
        offence="message",
        reason=f"text {bundle.text}, from token {last.start}: hidden states are off by {shown}, allowed "
        f"{offer.tolerance:.1e}",
        text=bundle.text,
        start=last.start,
        measured=distance,
        allowed=offer.tolerance,
    )


def measure_pieces(truth: Sequence[Tensor], claimed: Sequence[Tensor]) -> list[float]:
    """Return the distance of each piece, as `distance_to_truth`."""
    return [distance_to_truth(actual[None], right[None]) for right, actual in zip(truth, claimed, strict=True)]


def first_piece_off(distances: Sequence[float], tolerance: float) -> int | None:
    """Return the first piece that is not within the tolerance; a NaN never is."""
    return next((number for number, distance in enumerate(distances) if not distance <= tolerance), None)


def _open_header(statements: StatementReader, header: SignedHeader, link: tuple[str, str], kind: type[Any]) -> Any:
    table: Mapping[str, Any] = {**TO_HOLDER, **TO_SERVER}
    try:
        opened = statements.open_frame_header(to_signed(header), link)
        body = parse_body(table, opened.fields.kind, opened.fields.body)
    except (FrameError, SignatureError) as exc:
        raise EvidenceError(f"a header does not hold: {exc}") from exc
    if not isinstance(body, kind):
        raise EvidenceError(f"a header is of a {header.fields.kind!r} message")
    return body
