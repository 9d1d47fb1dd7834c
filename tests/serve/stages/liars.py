"""Parties that lie while they serve a stage; each computes honestly but for what its name says."""

import torch
from stage_scene import worker_file

from phalanx.errors import ModelError
from phalanx.serve.stages import StageHolder
from phalanx.serve.stages.messages import SignedTokenPiece, StageAnswer
from phalanx.transport.tensors import tensor_buffers


class Liar(StageHolder):
    """Changes hidden states of the rows that `is_target` chooses, then signs them."""

    def __init__(self, **changes):
        super().__init__(worker_file(**changes))

    def extend_texts(self, pieces, texts, hidden):
        outputs = super().extend_texts(pieces, texts, hidden).clone()
        row = 0
        for piece in pieces:
            for position in range(piece.start, piece.start + piece.length):
                if self.is_target(piece, position):
                    outputs[row] = self.bend(outputs[row])
                row += 1
        return outputs

    def is_target(self, piece, position):
        return True

    def bend(self, row):
        return -row


class OnePosition(Liar):
    """Lies about a single position, the last one of the prompt."""

    def is_target(self, piece, position):
        return piece.start == 0 and position == piece.length - 1


class AfterTokens(Liar):
    """Honest for the first tokens that it writes."""

    def is_target(self, piece, position):
        return position >= 12


class DecodeOnly(Liar):
    """Honest while a prompt is read."""

    def is_target(self, piece, position):
        return piece.start > 0 and piece.length == 1


class NoNumber(Liar):
    """Gives a number that is none."""

    def is_target(self, piece, position):
        return position == 9

    def bend(self, row):
        return torch.full_like(row, float("nan"))


class ReplayedText(StageHolder):
    """Gives what it gave for another text, where that had the same form."""

    def __init__(self):
        super().__init__(worker_file())
        self._seen = {}

    def extend_texts(self, pieces, texts, hidden):
        outputs = super().extend_texts(pieces, texts, hidden).clone()
        parts = list(torch.split(outputs, [piece.length for piece in pieces]))
        for place, piece in enumerate(pieces):
            earlier = self._seen.setdefault((piece.start, piece.length), (piece.text, parts[place].clone()))
            if earlier[0] != piece.text:
                parts[place] = earlier[1]
        return torch.cat(parts)


class StaleCache(StageHolder):
    """Goes on from the keys and values that it had behind the prompt, whatever was written since."""

    def __init__(self):
        super().__init__(worker_file())
        self._prompts = {}

    def extend_texts(self, pieces, texts, hidden):
        outputs = super().extend_texts(pieces, texts, hidden).clone()
        parts = list(torch.split(outputs, [piece.length for piece in pieces]))
        inputs = torch.split(hidden, [piece.length for piece in pieces])
        for place, (piece, text) in enumerate(zip(pieces, texts, strict=True)):
            if not piece.start:
                self._prompts[piece.text] = text.cache.copy_prefix(text.length)
                continue
            stale = self._blocks.open_text()
            before = self._prompts[piece.text]
            stale.cache, stale.length = before.copy_prefix(before.length), before.length
            parts[place] = self._blocks.extend([(stale, piece.length)], inputs[place])
        return torch.cat(parts)


class Refuser(StageHolder):
    """Says that it does not go on, after some steps."""

    def __init__(self, steps=2):
        super().__init__(worker_file())
        self._steps = steps

    def answer_step(self, step, digest, payload):
        if step.order >= self._steps:
            raise ModelError("no more for today")
        return super().answer_step(step, digest, payload)


class Silent(Refuser):
    """Does not answer, after some steps."""

    def answer_step(self, step, digest, payload):
        return [] if step.order >= self._steps else StageHolder.answer_step(self, step, digest, payload)


class TwoAnswers(StageHolder):
    """Signs a second, different answer to the same step."""

    def __init__(self):
        super().__init__(worker_file())

    def answer_step(self, step, digest, payload):
        ((answer, content),) = super().answer_step(step, digest, payload)
        other = bytes(tensor_buffers(torch.zeros(len(content) // 4)))
        return [(answer, content), (answer, other)]


class OtherBytes(StageHolder):
    """Signs the digest of the right hidden states and sends others."""

    def __init__(self):
        super().__init__(worker_file())

    def answer_step(self, step, digest, payload):
        ((answer, content),) = super().answer_step(step, digest, payload)
        states = -torch.frombuffer(bytearray(content), dtype=torch.float32)
        return [(answer, bytes(tensor_buffers(states)))]


class OtherPieces(StageHolder):
    """Signs pieces of a text that was not in the step."""

    def __init__(self):
        super().__init__(worker_file())

    def answer_step(self, step, digest, payload):
        ((answer, content),) = super().answer_step(step, digest, payload)
        last = answer.pieces[-1]
        moved = SignedTokenPiece(text=last.text + 7, start=last.start, length=last.length, link=last.link)
        return [(answer.model_copy(update={"pieces": (*answer.pieces[:-1], moved)}), content)]


class OtherPlace(StageHolder):
    """Signs that its states stand one token further on."""

    def __init__(self):
        super().__init__(worker_file())

    def answer_step(self, step, digest, payload):
        ((answer, content),) = super().answer_step(step, digest, payload)
        moved = tuple(piece.model_copy(update={"start": piece.start + 1}) for piece in answer.pieces)
        return [(answer.model_copy(update={"pieces": moved}), content)]


class HugeBytes(StageHolder):
    """Answers with many times the bytes that it was asked for, and signs them."""

    def __init__(self):
        super().__init__(worker_file())

    def answer_step(self, step, digest, payload):
        ((answer, content),) = super().answer_step(step, digest, payload)
        return [(answer, content + bytes(1 << 22))]


class EarlierAnswer(Refuser):
    """Sends the answer to an earlier step again, after some steps, in a fresh frame of this session."""

    def __init__(self, steps=2):
        super().__init__(steps)
        self._first = None

    def answer_step(self, step, digest, payload):
        self._first = self._first or StageHolder.answer_step(self, step, digest, payload)
        return self._first if step.order >= self._steps else StageHolder.answer_step(self, step, digest, payload)


class ForeignStage(StageHolder):
    """Signs its answers as those of another offer."""

    def __init__(self):
        super().__init__(worker_file())

    def answer_step(self, step, digest, payload):
        ((answer, content),) = super().answer_step(step, digest, payload)
        return [(answer.model_copy(update={"offer": "5" * 64}), content)]


class Babbler(Refuser):
    """Sends frames that nobody asked for instead of an answer, after some steps."""

    def answer_step(self, step, digest, payload):
        if step.order < self._steps:
            return StageHolder.answer_step(self, step, digest, payload)
        answer = StageAnswer(offer=step.offer, order=step.order, step="7" * 64, pieces=())
        return [(answer, b"")] * 40


class ShorterBytes(StageHolder):
    """Sends fewer hidden states than it was asked for, and signs them."""

    def __init__(self):
        super().__init__(worker_file())

    def answer_step(self, step, digest, payload):
        ((answer, content),) = super().answer_step(step, digest, payload)
        return [(answer, content[: len(content) // 2])]


BENDERS = {
    "one_position": OnePosition,
    "after_tokens": AfterTokens,
    "decode_only": DecodeOnly,
    "replayed_text": ReplayedText,
    "stale_cache": StaleCache,
}
"""Lies about hidden states that nothing but a check finds."""

FORMS = {
    "huge_bytes": HugeBytes,
    "other_bytes": OtherBytes,
    "other_pieces": OtherPieces,
    "other_place": OtherPlace,
    "shorter_bytes": ShorterBytes,
}
"""Answers that are wrong whatever the weights."""
