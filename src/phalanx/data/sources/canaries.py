"""Canaries: invented secrets in a dataset, by which its owner measures how much a model repeats."""

import hashlib
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from phalanx.config import StrictModel, canonical_json
from phalanx.data.sources.source import Document, SourceSettings

_FIRST_CANDIDATE = 1 << 32
"""Number of the first text of the same form that is never planted."""
_WORDS = tuple(
    """
    amber anchor apple arrow autumn badge banner barrel basket beacon birch bottle branch bridge bronze button
    cabin candle canyon carbon carpet castle cedar cherry cobalt copper coral cotton crater cricket crystal
    dagger desert drum eagle ember fabric falcon feather fiddle forest garden ginger glacier granite hammer
    harbor hazel helmet honey indigo island ivory jasmine kettle ladder lantern lemon magnet maple marble
    meadow mirror needle
    """.split()  # noqa: SIM905
)


class CanarySettings(StrictModel):
    """Canaries of a recipe, or of a run's own sources.

    Attributes:
        count: Number of canaries with different secrets.
        copies: Documents that hold each of them; no two documents are equal.
        words: Words of a secret; each has six bits.
        seed: Decides the secrets. Whoever has the recipe can measure too.
    """

    count: int = Field(default=4, ge=1, le=10_000)
    copies: int = Field(default=8, ge=1, le=10_000)
    words: int = Field(default=6, ge=2, le=16)
    seed: int = Field(default=0, ge=0, lt=1 << 63)


class CanaryConfig(SourceSettings, CanarySettings):
    """Planted canaries as a source; the account counts and names their documents as it does for any source."""

    kind: Literal["canaries"] = "canaries"


class CanaryDocuments:
    """The planted documents; the texts are a function of the settings alone."""

    def __init__(self, config: CanarySettings) -> None:
        self._config = config

    def fingerprint(self) -> str:
        """Digest of the settings."""
        settings = {name: getattr(self._config, name) for name in CanarySettings.model_fields}
        return hashlib.sha256(canonical_json(["canaries", settings])).hexdigest()

    def documents(self) -> Iterator[Document]:
        """Copy by copy, so that a prefix of the documents has all canaries equally often."""
        for copy in range(self._config.copies):
            for number, text in enumerate(planted_canaries(self._config)):
                yield Document(f"canary-{number:04}-copy-{copy:04}", f"Notice {copy + 1} of record {number}.\n{text}")


def planted_canaries(config: CanarySettings) -> list[str]:
    """Return the text of each canary."""
    return [_canary_text(config, number) for number in range(config.count)]


def candidate_canaries(config: CanarySettings, count: int) -> list[str]:
    """Return texts of the same form that are never planted."""
    return [_canary_text(config, _FIRST_CANDIDATE + number) for number in range(count)]


def _canary_text(config: CanarySettings, number: int) -> str:
    drawn = hashlib.sha256(canonical_json(["canary", config.seed, number])).digest()
    return f"The reference phrase is {' '.join(_WORDS[byte % len(_WORDS)] for byte in drawn[: config.words])}."
