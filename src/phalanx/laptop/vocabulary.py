"""The vocabulary size that the user's texts support, and its bytes per token: measured on a part of the texts."""

from dataclasses import dataclass

from phalanx.data.tokenizers.config import ByteBpeTraining
from phalanx.data.tokenizers.training import train_tokenizer
from phalanx.errors import DataError
from phalanx.laptop.texts import CutTexts

MARKS = ("<|im_start|>", "<|im_end|>")
"""Tokens that begin and end a turn of a chat."""
_SAMPLE_BYTES = 2_000_000


@dataclass(frozen=True)
class Vocabulary:
    """A size that the texts support.

    Attributes:
        bytes_per_token: On held-out text, by a vocabulary that was trained on a part of the texts.
    """

    size: int
    bytes_per_token: float

    def count_tokens(self, num_bytes: float) -> float:
        """Estimate the tokens of so much text."""
        return num_bytes / self.bytes_per_token


def fit_vocabulary(texts: CutTexts, size: int) -> Vocabulary:
    """Return a vocabulary of a size, or of as many tokens as the texts support.

    Raises:
        DataError: They support fewer than the bytes and the marks.
    """
    # evenly over the texts; what a part of them supports, all of them do
    part = texts.train[:: max(1, texts.train_bytes // _SAMPLE_BYTES)]
    try:
        tokenizer = train_tokenizer(part, ByteBpeTraining(vocab_size=size, special_tokens=MARKS))
    except DataError as exc:
        supported = exc.error_facts.get("expected", "").removeprefix("at most ")
        if exc.error_facts["code"] != "PHX-I017" or not supported.isdecimal():
            raise
        size = int(supported)
        tokenizer = train_tokenizer(part, ByteBpeTraining(vocab_size=size, special_tokens=MARKS))
    num_tokens = sum(map(len, tokenizer.encode_texts(texts.held_out)))
    return Vocabulary(size, texts.held_out_bytes / num_tokens)
