"""The conversations of one client: looked at before anything is called, rendered and marked where they are."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from phalanx.config import canonical_json
from phalanx.data import ChatCorpus, DataConfig, prepare_corpus
from phalanx.data.chat.files import ConversationFiles
from phalanx.data.chat.settings import ConversationsConfig, ConversationSource
from phalanx.engine import NO_EXTRAS
from phalanx.errors import ConfigError, DataError
from phalanx.models import ModelSource
from phalanx.models.layout import check_vocabulary
from phalanx.train.config import RunConfig


@dataclass(frozen=True)
class ConversationRows:
    """Conversations as rows, one each: tokens, and labels where the assistant speaks."""

    corpus: ChatCorpus

    @property
    def row_count(self) -> int:
        """Conversations."""
        return self.corpus.num_train_sequences

    @property
    def rows_digest(self) -> str:
        """SHA-256 in hex of all that rows come from."""
        return self.corpus.digest

    def pick_rows(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """Ids and labels of some conversations."""
        batch = self.corpus.train_batch(list(indices))
        return batch.input_ids, batch.labels, NO_EXTRAS


def look_at_conversations(wanted: ConversationsConfig, train: Path, test: Path) -> None:
    """Read a client's conversations, and look that none is in both files; free of torch and tokenizers."""
    learned, held_out = (
        {document.text for document in ConversationFiles(ConversationSource(path=path), wanted.broken).documents()}
        for path in (train, test)
    )
    for path, documents in ((train, learned), (test, held_out)):
        if not documents:
            raise DataError(f"{path}: holds no conversation; give at least one")
    if learned & held_out:
        raise DataError(
            f"{test}: {len(learned & held_out)} of its conversations are also training conversations, so the "
            "held-out score would prove nothing; remove them from one file"
        )


def read_conversations(
    run: RunConfig, source: ModelSource, cache: Path, paths: Sequence[Path]
) -> tuple[list[ConversationRows], str]:
    """Render and encode files of conversations, each to rows of its own.

    Returns:
        The rows of each, and the digest of what renders and encodes, the same for all clients.
    """
    corpora = [_prepare_conversations(_client_sources(run.data, path), source, cache, run.train.seed) for path in paths]
    for corpus in corpora:
        check_vocabulary(corpus.vocab_size, source.vocab_size)
    rendered = {
        canonical_json([corpus.manifest.template_digest, corpus.manifest.tokenizer.digest]) for corpus in corpora
    }
    return [ConversationRows(corpus) for corpus in corpora], hashlib.sha256(rendered.pop()).hexdigest()


def _client_sources(data: DataConfig, path: Path) -> DataConfig:
    if data.conversations is None:
        raise ConfigError("data.conversations: missing, so the run has no clients with conversations")
    talks = data.conversations.model_copy(update={"sources": (ConversationSource(path=path),)})
    # what is held out is a file of its own
    return data.model_copy(update={"conversations": talks, "validation_share": 0.0})


def _prepare_conversations(data: DataConfig, source: ModelSource, cache: Path, seed: int) -> ChatCorpus:
    corpus = prepare_corpus(data, cache, seed, source.tokenizer_path)
    if not isinstance(corpus, ChatCorpus):
        raise DataError("data.conversations: not a corpus of conversations")
    return corpus
