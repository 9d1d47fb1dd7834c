"""The side of a party that holds a stage: it loads weights, extends texts, and signs what went in and came out."""

import json
from collections.abc import Sequence

from safetensors.torch import load
from torch import Tensor, float32

from phalanx.errors import FrameError, ModelError
from phalanx.models import weights_digest
from phalanx.pipeline import settle_numerics
from phalanx.serve.stages.blocks import HeldText, StageBlocks, cut_pieces
from phalanx.serve.stages.config import StageWorkerConfig
from phalanx.serve.stages.messages import (
    TO_HOLDER,
    SignedTokenPiece,
    StageAnswer,
    StageFilePart,
    StageOffer,
    StageReady,
    StageRefusal,
    StagesEnd,
    StageStep,
    TokenPiece,
    first_link,
    next_link,
    states_digest,
)
from phalanx.transport import CheckedFrame, Endpoint, OwnerLink, join_owner, parse_body
from phalanx.transport.tensors import UNREADABLE, tensor_buffers, tensor_from

Reply = tuple[StageAnswer, bytes]


class StageHolder:
    """The computing part of a party: weights in, signed pieces out.

    Args:
        config: Bounds of its memory and computing.
    """

    def __init__(self, config: StageWorkerConfig) -> None:
        self._config = config
        self._blocks: StageBlocks | None = None
        self._offer = ""
        self._texts: dict[int, tuple[HeldText, str]] = {}
        self._num_texts = 0

    def admit_offer(self, offer: StageOffer) -> None:
        """Return where the stage fits the bounds of this party's file.

        Raises:
            ModelError: It is larger, or would be judged more narrowly.
        """
        config = self._config
        bounds = (
            ("max_size_bytes", offer.size_bytes, config.max_size_bytes),
            ("max_texts", offer.max_texts, config.max_texts),
            ("max_tokens", offer.max_tokens, config.max_tokens),
        )
        for name, wanted, allowed in bounds:
            if wanted > allowed:
                raise ModelError(f"{name}: the owner wants {wanted}, this party's file allows {allowed}")
        if offer.tolerance < config.tolerance:
            raise ModelError(
                f"tolerance: would be judged by {offer.tolerance:g}, this party's file allows {config.tolerance:g}"
            )

    def load_stage(self, offer: StageOffer, weights: dict[str, Tensor]) -> None:
        """Build the stage; texts of an earlier one are dropped, and their numbers are not taken again.

        Raises:
            ModelError: The weights have another digest than the offer, or do not fit its config.
        """
        if weights_digest(weights.items()) != offer.weights:
            raise ModelError("the weights that came are not those that the owner names")
        try:
            config = json.loads(offer.config)
        except (ValueError, RecursionError) as exc:
            raise ModelError(f"the config that came is malformed ({exc})") from exc
        self._blocks = StageBlocks.build(config, (offer.first_layer, offer.end_layer), weights)
        # not the numbers: a link of an earlier text would convict a later one of the same number
        self._offer, self._texts = offer.digest, {}

    def answer_step(self, step: StageStep, digest: str, payload: memoryview) -> Sequence[Reply]:
        """Extend texts, and sign each piece; an honest party gives one answer.

        Args:
            digest: Of the owner's header of this step.

        Raises:
            FrameError: The step is of another stage, goes on with a text elsewhere than it ends, or is malformed.
            ModelError: It needs more texts or tokens than this party gives.
        """
        blocks = self._require_blocks(step)
        hidden = tensor_from(payload, float32, (sum(piece.length for piece in step.pieces), blocks.width))
        for text in step.closed:
            self._texts.pop(text, None)
        texts = self._find_texts(blocks, step)
        outputs = self.extend_texts(step.pieces, texts, hidden)
        lengths = [piece.length for piece in step.pieces]
        signed = [
            self._sign_piece(piece, inputs, states)
            for piece, inputs, states in zip(
                step.pieces, cut_pieces(hidden, lengths), cut_pieces(outputs, lengths), strict=True
            )
        ]
        answer = StageAnswer(offer=self._offer, order=step.order, step=digest, pieces=tuple(signed))
        return [(answer, bytes(tensor_buffers(outputs)))]

    def extend_texts(self, pieces: Sequence[TokenPiece], texts: Sequence[HeldText], hidden: Tensor) -> Tensor:
        """Run the stage over pieces of texts; return hidden states ``[tokens, dim]``."""
        if self._blocks is None:
            raise ModelError("no stage is loaded")
        lengths = [piece.length for piece in pieces]
        return self._blocks.extend(list(zip(texts, lengths, strict=True)), hidden)

    def _require_blocks(self, step: StageStep) -> StageBlocks:
        if self._blocks is None or step.offer != self._offer:
            raise FrameError("a step of a stage that is not loaded")
        return self._blocks

    def _find_texts(self, blocks: StageBlocks, step: StageStep) -> list[HeldText]:
        """Return the text of each piece; one that begins is opened."""
        texts: list[HeldText] = []
        open_texts, num_texts = dict(self._texts), self._num_texts
        ends: dict[int, int] = {}
        for piece in step.pieces:
            if piece.text not in open_texts:
                if piece.text < num_texts:
                    raise FrameError(f"text {piece.text} goes on, and is closed")
                num_texts = piece.text + 1
                open_texts[piece.text] = blocks.open_text(), first_link(step.offer, piece.text)
            text, _ = open_texts[piece.text]
            if piece.start != ends.get(piece.text, text.length):
                raise FrameError(f"text {piece.text} goes on at {piece.start}, it has {text.length} tokens")
            ends[piece.text] = piece.start + piece.length
            texts.append(text)
        num_tokens = sum(ends.get(number, text.length) for number, (text, _) in open_texts.items())
        if len(open_texts) > self._config.max_texts or num_tokens > self._config.max_tokens:
            raise ModelError(f"{len(open_texts)} texts with {num_tokens} tokens are more than this party's file allows")
        # a step that is refused leaves nothing behind
        self._texts, self._num_texts = open_texts, num_texts
        return texts

    def _sign_piece(self, piece: TokenPiece, inputs: Tensor, outputs: Tensor) -> SignedTokenPiece:
        text, link = self._texts[piece.text]
        link = next_link(link, piece.start, states_digest(inputs), states_digest(outputs))
        self._texts[piece.text] = text, link
        return SignedTokenPiece(text=piece.text, start=piece.start, length=piece.length, link=link)


class StageService:
    """Answers one owner's frames.

    Args:
        owner: Party name; no other party is answered.
        holder: Computes; another than the honest one is for drills only.
    """

    def __init__(self, endpoint: Endpoint, owner: str, holder: StageHolder) -> None:
        self._endpoint, self._owner, self._holder = endpoint, owner, holder
        self._offer: StageOffer | None = None
        self._file = bytearray()
        self._order = -1

    def serve_frames(self, link: OwnerLink) -> None:
        """Serve until told to end.

        Raises:
            PeerLostError: The owner is gone, or serves another session by now.
        """
        for item in link.receive_frames():
            if not self.take_frame(item):
                return

    def take_frame(self, item: CheckedFrame) -> bool:
        """Handle one frame; False where it was the last one."""
        if item.sender != self._owner:
            return True
        body = parse_body(TO_HOLDER, item.kind, item.body)
        try:
            match body:
                case StagesEnd():
                    return False
                case StageOffer():
                    self._holder.admit_offer(body)
                    self._offer, self._file = body, bytearray()
                case StageFilePart():
                    self._take_part(body, item.payload)
                case StageStep():
                    self._answer_step(body, item)
        except ModelError as exc:
            refusal = StageRefusal(reason=str(exc)[:500])
            self._endpoint.send_frame(self._owner, refusal.kind, refusal.model_dump(mode="json"))
        return True

    def _take_part(self, part: StageFilePart, payload: memoryview) -> None:
        offer = self._offer
        if offer is None:
            # of an offer that was refused
            return
        if part.offer != offer.digest or part.offset != len(self._file):
            raise FrameError("a part of a stage came out of order")
        if len(self._file) + payload.nbytes > offer.size_bytes:
            raise FrameError(f"a stage of {offer.size_bytes} bytes has more than was announced")
        self._file += payload
        if len(self._file) < offer.size_bytes:
            return
        try:
            weights = load(bytes(self._file))
        except UNREADABLE as exc:
            raise ModelError(f"the weights that came are malformed ({exc})") from exc
        self._offer, self._file = None, bytearray()
        self._holder.load_stage(offer, weights)
        ready = StageReady(offer=offer.digest)
        self._endpoint.send_frame(self._owner, ready.kind, ready.model_dump(mode="json"))

    def _answer_step(self, step: StageStep, item: CheckedFrame) -> None:
        if step.order <= self._order:
            # two answers to one step, which may differ in their last bits, would convict this party
            raise FrameError(f"step {step.order} came after step {self._order}")
        self._order = step.order
        for answer, payload in self._holder.answer_step(step, item.header.header_digest, item.payload):
            self._endpoint.send_frame(self._owner, answer.kind, answer.model_dump(mode="json"), [payload])


def run_stage_worker(config: StageWorkerConfig, holder: StageHolder | None = None) -> None:
    """Serve until the owner ends or is gone.

    Args:
        config: This party's identity, where the owner listens, and bounds.
        holder: Computes; another than the honest one is for drills only.

    Raises:
        CertificateError: This party's own identity is unusable.
    """
    settle_numerics(config.threads)
    with join_owner(config) as link:
        StageService(link.endpoint, config.owner_name, holder or StageHolder(config)).serve_frames(link)
        link.endpoint.flush_frames(config.transport.timeout_s)
