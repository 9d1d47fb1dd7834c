"""Small texts with the statistics of a language: a few common words, many rare ones."""

import random
from pathlib import Path

from phalanx.data import BpeConfig, DataConfig
from phalanx.data.sources import TextConfig

_SYLLABLES = [
    "sta",
    "ge",
    "shi",
    "eld",
    "pha",
    "lanx",
    "mar",
    "ch",
    "tor",
    "ver",
    "di",
    "ct",
    "on",
    "ra",
    "nk",
]
DELIMITER = "\n=====\n"


def made_documents(count: int = 60, seed: int = 0, words: int = 80) -> list[str]:
    """Different documents, the same for the same arguments."""
    draw = random.Random(seed)
    lexicon = ["".join(draw.choices(_SYLLABLES, k=draw.randint(1, 3))) for _ in range(200)]
    weights = [1 / (rank + 1) for rank in range(len(lexicon))]
    return [f"{' '.join(draw.choices(lexicon, weights, k=words))} number {at}." for at in range(count)]


def write_text(path: Path, documents: list[str]) -> TextConfig:
    """One file with a delimiter between documents."""
    path.write_text(DELIMITER.join(documents), encoding="utf-8")
    return TextConfig(path=path, delimiter=DELIMITER)


def made_config(path: Path, documents: list[str] | None = None, **changes: object) -> DataConfig:
    """A config over a text file at `path`."""
    source = write_text(path, made_documents() if documents is None else documents)
    settings = {
        "sources": (source,),
        "tokenizer": BpeConfig(vocab_size=300),
        "sequence_length": 16,
        "validation_share": 0.2,
    }
    return DataConfig(**(settings | changes))
