"""What a recipe says of a vocabulary that is to be trained; one class a kind, free of the libraries that train."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from phalanx.config import StrictModel

END_OF_TEXT = "<|endoftext|>"
SpecialToken = Annotated[str, Field(min_length=1, max_length=100)]


class VocabularyTraining(StrictModel):
    """What every kind of vocabulary has.

    Attributes:
        vocab_size: All tokens: special ones, single bytes or characters, and learned ones.
        end_of_text: The special token after each document.
        special_tokens: Further ones, such as the marks of a chat; none of them can be written in a text.
        normalization: Unicode form that every text is brought to before it is encoded; it cannot be undone.
        lowercase: Whether upper case is given up as well.
        split_digits: Each digit is a token of its own, so that numbers are cut the same way everywhere.
    """

    vocab_size: int = Field(ge=2, le=1 << 24)
    end_of_text: SpecialToken = END_OF_TEXT
    special_tokens: tuple[SpecialToken, ...] = ()
    normalization: Literal["none", "nfc", "nfkc"] = "none"
    lowercase: bool = False
    split_digits: bool = False

    @property
    def all_special(self) -> tuple[str, ...]:
        """Every special token, the end of text first."""
        return (self.end_of_text, *self.special_tokens)

    @model_validator(mode="after")
    def _check_special(self) -> Self:
        twice = sorted({token for token in self.all_special if self.all_special.count(token) > 1})
        if twice:
            raise ValueError(f"special_tokens: {twice[0]!r} appears twice; list each once")
        blank = [token for token in self.all_special if token != token.strip()]
        if blank:
            raise ValueError(f"special_tokens: {blank[0]!r} has white space around it; remove it")
        return self


class ByteBpeTraining(VocabularyTraining):
    """A byte-level BPE: 256 bytes, then merges; it encodes every text and gives it back to the byte.

    Attributes:
        min_frequency: A pair that is rarer is not merged.
    """

    kind: Literal["bpe"] = "bpe"
    min_frequency: int = Field(default=2, ge=1)


class WordPieceTraining(VocabularyTraining):
    """WordPiece, as BERT has it: words are cut at white space and punctuation, and white space is given up.

    Attributes:
        min_frequency: A pair that is rarer is not merged.
        unknown: Stands for a word with a character that is not in the vocabulary.
    """

    kind: Literal["wordpiece"] = "wordpiece"
    min_frequency: int = Field(default=2, ge=1)
    unknown: SpecialToken = "[UNK]"

    @property
    def all_special(self) -> tuple[str, ...]:
        return (self.end_of_text, self.unknown, *self.special_tokens)


class SentencePieceTraining(VocabularyTraining):
    """SentencePiece, by BPE or by a unigram model: white space is a character like others, so nothing is given up.

    Attributes:
        byte_fallback: A character that is not in the vocabulary becomes its bytes; else it becomes ``<unk>``.
        character_coverage: Share of the training text's characters that must be in the vocabulary.
    """

    kind: Literal["sentencepiece_bpe", "sentencepiece_unigram"]
    byte_fallback: bool = True
    character_coverage: float = Field(default=0.9995, gt=0.9, le=1.0, allow_inf_nan=False)


TrainingConfig = Annotated[ByteBpeTraining | WordPieceTraining | SentencePieceTraining, Field(discriminator="kind")]
"""What a recipe says of a vocabulary, told apart by ``kind``."""
