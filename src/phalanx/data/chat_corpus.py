"""A corpus of conversations: tokens, and how much each of them counts; opened only when every digest holds."""

import hashlib
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from phalanx.config import StrictModel, digest
from phalanx.data.chat.template import TEMPLATE_FILE
from phalanx.data.corpus import Corpus, CorpusFacts, SequenceLayout, TokenGroup
from phalanx.data.manifest import SourceCounts, TokenizerRecord
from phalanx.data.packing import TokenSplit
from phalanx.data.tokenizers.tokenizer import TOKENIZER_FILE
from phalanx.errors import DataError

FORMAT: Literal[1] = 1
MANIFEST_FILE = "conversations.json"
SPLITS = ("train", "validation")


class ChatSplitRecord(StrictModel):
    """The three files of one split.

    Attributes:
        conversations: Those that were kept.
        tokens: Of all of them.
        targets: Tokens that are learned.
        digests: SHA-256 of tokens, weights and beginnings.
    """

    conversations: int = Field(ge=0)
    tokens: int = Field(ge=0)
    targets: int = Field(ge=0)
    digests: tuple[str, str, str]


class ChatManifest(StrictModel):
    """Everything about a corpus of conversations but its tokens.

    Attributes:
        key: Of all that decided it.
        template: The name of the chat template.
        template_digest: SHA-256 of its text.
        end_of_turn: The token that ends what the assistant says; None where the template writes none.
        dropped: How many conversations were left out, by reason.
        examples: Names of the first of them.
    """

    format: Literal[1] = FORMAT
    key: str
    token_dtype: Literal["<u2", "<u4"]
    sources: tuple[SourceCounts, ...]
    tokenizer: TokenizerRecord
    template: str
    template_digest: str
    end_of_turn: int | None
    train: ChatSplitRecord
    validation: ChatSplitRecord
    dropped: dict[str, int] = Field(default={})
    examples: tuple[str, ...] = ()


class ChatCorpus(Corpus):
    """A corpus of conversations; the labels of its rows are what the assistant says.

    Attributes:
        manifest: What it was made of.
        template: The file of its chat template, which exports of the model get.
    """

    def __init__(self, directory: Path, manifest: ChatManifest, layout: SequenceLayout) -> None:
        self.manifest = manifest
        self.template = directory / TEMPLATE_FILE
        content = hashlib.sha256(f"{layout.attention} {layout.sequence_length} {digest(manifest)}".encode()).hexdigest()
        tokenizer = manifest.tokenizer
        facts = CorpusFacts(content, tokenizer.vocab_size, tokenizer.eos_id, directory / TOKENIZER_FILE)
        train, held_out = (_open_split(directory, name, manifest) for name in SPLITS)
        super().__init__(facts, [TokenGroup("", content, train, held_out)], layout)

    @property
    def end_of_turn(self) -> int | None:
        """The token at which an answer ends."""
        return self.manifest.end_of_turn

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a person should know of it: how much is learned, and what was left out."""
        train, dropped = self.manifest.train, self.manifest.dropped
        learned = f"{train.targets} of {train.tokens} tokens in {train.conversations} conversations are learned"
        lines = [f"{learned}, by the chat template {self.manifest.template}"]
        if dropped:
            counts = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
            lines.append(f"conversations left out: {counts}; for example {'; '.join(self.manifest.examples)}")
        return tuple(lines)


def open_conversations(home: Path, layout: SequenceLayout, key: str | None = None) -> ChatCorpus:
    """Check a corpus of conversations against its manifest and open it.

    Raises:
        DataError: A file is missing or is not what the manifest says, or the corpus is of another config.
    """
    try:
        manifest = ChatManifest.model_validate_json((home / MANIFEST_FILE).read_bytes())
        for name in SPLITS:
            for path, expected in zip(split_files(home, name), getattr(manifest, name).digests, strict=True):
                if hashlib.sha256(path.read_bytes()).hexdigest() != expected:
                    raise DataError(f"{path}: is not what {MANIFEST_FILE} says; delete {home} to have it made again")
        found = hashlib.sha256((home / TOKENIZER_FILE).read_bytes()).hexdigest()
        template = hashlib.sha256((home / TEMPLATE_FILE).read_bytes()).hexdigest()
    except (OSError, ValidationError) as exc:
        raise DataError(f"{home}: is no corpus of conversations ({exc}); delete it to have it made again") from exc
    whole = (manifest.tokenizer.digest, manifest.template_digest, key or manifest.key)
    if (found, template, manifest.key) != whole:
        raise DataError(f"{home}: is damaged, or of another config; delete it to have it made again")
    return ChatCorpus(home, manifest, layout)


def split_files(directory: Path, split: str) -> tuple[Path, Path, Path]:
    """Return the files of tokens, weights and beginnings."""
    return directory / f"{split}.tokens", directory / f"{split}.weights", directory / f"{split}.starts"


def _open_split(directory: Path, name: str, manifest: ChatManifest) -> TokenSplit:
    tokens, weights, starts = split_files(directory, name)
    begins = np.fromfile(starts, dtype="<i8").astype(np.int64)
    if not tokens.stat().st_size:
        # an empty file cannot be mapped
        empty = np.empty(0, dtype=manifest.token_dtype)
        return TokenSplit(empty, manifest.tokenizer.eos_id, begins.copy, _no_field, np.empty(0, np.float32))
    ids: NDArray[np.unsignedinteger] = np.memmap(tokens, dtype=manifest.token_dtype, mode="r")
    of_tokens: NDArray[np.float32] = np.memmap(weights, dtype="<f4", mode="r")
    return TokenSplit(ids, manifest.tokenizer.eos_id, begins.copy, _no_field, of_tokens)


def _no_field(name: str) -> NDArray[np.float64]:
    raise DataError(f"data: conversations have no field {name!r}")
