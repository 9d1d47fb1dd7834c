"""A corpus of conversations: tokens, and how much each of them counts; opened only when every digest holds."""

import hashlib
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from phalanx.config import StrictModel, digest_config
from phalanx.config.strict import later_key
from phalanx.data.chat.template import TEMPLATE_FILE
from phalanx.data.corpus import Corpus, CorpusFacts, SequenceLayout, TokenGroup
from phalanx.data.manifest import SourceCounts, TokenizerRecord
from phalanx.data.own_shards import GROUP, SPLITS, open_own_shards, own_starts
from phalanx.data.packing import TokenSplit
from phalanx.data.shards import Dataset
from phalanx.data.tokenizers.tokenizer import TOKENIZER_FILE
from phalanx.errors import DataError

FORMAT: Literal[1] = 1
MANIFEST_FILE = "conversations.json"


class ChatSplitRecord(StrictModel):
    """The content of one split.

    Attributes:
        digests: SHA-256 of tokens, weights and beginnings.
    """

    conversations: int = Field(ge=0)
    tokens: int = Field(ge=0)
    targets: int = Field(ge=0)
    digests: tuple[str, str, str]


class ChatManifest(StrictModel):
    """Everything about a corpus of conversations but its tokens.

    Attributes:
        key: Key of everything that decided it.
        template_digest: SHA-256 of its text.
        end_of_turn: The token that ends an assistant's turn; None where the template writes none.
        cut: Number of conversations of which only the first tokens are learned.
        dropped: Number of left-out conversations, by reason.
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
    cut: int = later_key(0, ge=0)
    dropped: dict[str, int] = Field(default={})
    examples: tuple[str, ...] = ()


class ChatCorpus(Corpus):
    """A corpus of conversations; the labels of its rows are the assistant's turns.

    Attributes:
        template: The file of its chat template, which exports of the model get.
    """

    def __init__(self, dataset: Dataset, manifest: ChatManifest, layout: SequenceLayout) -> None:
        self.manifest = manifest
        self.directory = directory = dataset.directory
        self.template = directory / TEMPLATE_FILE
        # corpora of older versions did not count cuts, and their runs go on
        digest = digest_config(manifest.model_copy(update={"cut": 0}))
        content = hashlib.sha256(f"{layout.attention} {layout.sequence_length} {digest}".encode()).hexdigest()
        tokenizer = manifest.tokenizer
        facts = CorpusFacts(content, tokenizer.vocab_size, tokenizer.eos_id, directory / TOKENIZER_FILE)
        train, held_out = (_open_split(dataset, name, manifest) for name in SPLITS)
        super().__init__(facts, [TokenGroup("", content, train, held_out)], layout)

    @property
    def end_of_turn(self) -> int | None:
        """The token at which an answer ends."""
        return self.manifest.end_of_turn

    @property
    def user_notes(self) -> tuple[str, ...]:
        """Return remarks for people: the learned share, and left-out conversations."""
        train, dropped = self.manifest.train, self.manifest.dropped
        learned = f"{train.targets} of {train.tokens} tokens in {train.conversations} conversations are learned"
        lines = [f"{learned}, by the chat template {self.manifest.template}"]
        if self.manifest.cut:
            lines.append(f"conversations cut to their first {self.layout.sequence_length} tokens: {self.manifest.cut}")
        if dropped:
            counts = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
            lines.append(f"conversations dropped: {counts}; for example {'; '.join(self.manifest.examples)}")
        return tuple(lines)


def open_conversations(home: Path, layout: SequenceLayout, signer: str | None = None) -> ChatCorpus:
    """Check a corpus of conversations and open it."""
    shards = open_own_shards(home, signer)
    try:
        manifest = ChatManifest.model_validate_json((home / MANIFEST_FILE).read_bytes())
    except (OSError, ValidationError) as exc:
        raise DataError(f"{home}: is not a corpus of conversations ({exc}); delete it to make it again") from exc
    return ChatCorpus(shards, manifest, layout)


def weights_file(directory: Path, split: str) -> Path:
    """Return the file that says how much each token counts."""
    return directory / f"{split}.weights"


def _open_split(dataset: Dataset, name: str, manifest: ChatManifest) -> TokenSplit:
    tokens, path = dataset.tokens(GROUP, name), weights_file(dataset.directory, name)
    # an empty file cannot be mapped
    weights: NDArray[np.float32] = np.memmap(path, dtype="<f4", mode="r") if len(tokens) else np.empty(0, np.float32)
    return TokenSplit(tokens, manifest.tokenizer.eos_id, partial(own_starts, dataset, name), _refuse_field, weights)


def _refuse_field(name: str) -> NDArray[np.float64]:
    raise DataError(f"data: conversations have no field {name!r}")
