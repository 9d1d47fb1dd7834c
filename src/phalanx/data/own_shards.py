"""The shards that a run makes of its own sources: written and verified as any dataset, and kept in its cache."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import tomli_w
from numpy.typing import NDArray

from phalanx.data.config import DataConfig
from phalanx.data.manifest import SourceCounts, TokenizerRecord
from phalanx.data.shards import (
    Dataset,
    DatasetFacts,
    DatasetWriter,
    RecipeRecord,
    SourceFacts,
    default_signing_key,
    fingerprint_of,
    load_signer,
    open_dataset,
)
from phalanx.data.tokenizers.tokenizer import TOKENIZER_FILE
from phalanx.errors import DataError
from phalanx.security.crypto import Identity

GROUP, SPLITS = "text", ("train", "validation")
"""The one group of such a dataset, and its parts; an empty one is there too."""

_NUMBERS = ("sequence_length", "validation_share", "max_documents")


@dataclass(frozen=True)
class ShardPlace:
    """The directory of one corpus's shards, and the key that signs them.

    Shards that another key has signed have another place, so that they are not opened.
    """

    home: Path
    signer: Identity

    @classmethod
    def from_cache(cls, cache_dir: Path, key: str, prefix: str = "") -> Self:
        """Return the place of the corpus with a key, for the signing key of the user."""
        signer = load_signer(default_signing_key())
        name = hashlib.sha256(f"shards {key} {fingerprint_of(signer)}".encode()).hexdigest()
        return cls(cache_dir / f"{prefix}{name[:32]}", signer)

    @property
    def signer_fingerprint(self) -> str:
        """Of the key that signs."""
        return fingerprint_of(self.signer)

    def sign_shards(
        self,
        writer: DatasetWriter,
        config: DataConfig,
        sources: Iterable[SourceCounts],
        tokenizer: TokenizerRecord,
        files: tuple[str, ...],
    ) -> None:
        """Sign the written shards.

        Args:
            config: The run file's section; what decided the tokens is kept as the recipe.
        """
        facts = DatasetFacts(
            sources=tuple(
                SourceFacts(name=source.kind, kind=source.kind, fingerprint=source.fingerprint) for source in sources
            ),
            tokenizer=tokenizer,
            recipe=RecipeRecord.from_content(_recipe_toml(config)),
            files=(TOKENIZER_FILE, *files),
        )
        writer.finish_dataset(facts, self.signer)


def _recipe_toml(config: DataConfig) -> str:
    """Return as TOML the part of a run file's section that decided the tokens."""
    read = config.sources if config.conversations is None else (config.conversations,)
    sections = {"sources": [source.model_dump(mode="json", exclude_none=True) for source in read]}
    numbers = {name: value for name in _NUMBERS if (value := getattr(config, name)) is not None}
    return tomli_w.dumps(
        {**numbers, "tokenizer": config.tokenizer.model_dump(mode="json", exclude_none=True), **sections}
    )


def open_own_shards(home: Path, signer: str | None) -> Dataset:
    """Open a run's own shards, with every token and further file checked."""
    try:
        shards = open_dataset(home, signer)
        for split in SPLITS:
            tokens = shards.tokens(GROUP, split)
            for start in range(0, len(tokens), shards.manifest.shard_tokens):
                tokens.read_tokens(start, min(len(tokens), start + shards.manifest.shard_tokens))
        for name in shards.manifest.files:
            shards.check_beside(name)
    except DataError as exc:
        raise DataError(f"{exc}; delete {home} to make the data again").with_facts(
            code="PHX-I018", file=str(home), do="delete it"
        ) from exc
    return shards


def own_starts(dataset: Dataset, split: str) -> NDArray[np.int64]:
    """Return where every document begins, and at the end the number of tokens, ``[documents + 1]``."""
    return dataset.document_starts(GROUP, split).astype(np.int64)
