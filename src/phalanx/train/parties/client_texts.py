"""The texts of one client, as its turns draw them; preferences with the log-probabilities of its own reference."""

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from phalanx.data.config import BpeConfig
from phalanx.data.order import sample_indices
from phalanx.data.tasks import load_own
from phalanx.data.tokenizers import fingerprint_tokenizer, load_tokenizer
from phalanx.engine import NO_EXTRAS
from phalanx.errors import ConfigError
from phalanx.models import ModelSource
from phalanx.models.layout import check_vocabulary
from phalanx.security.crypto import in_domain, read_private, write_private
from phalanx.split import microbatches_of
from phalanx.split.roles.turns import Rows
from phalanx.train.batches.labelled import LabelledRows, encode_rows
from phalanx.train.config import RunConfig, SplitRun
from phalanx.train.parties.client_conversations import read_conversations
from phalanx.train.parties.client_file import ClientFile
from phalanx.train.parties.client_preferences import read_preferences
from phalanx.train.records.run_directory import cache_beside
from phalanx.train.sessions.hooks import VALIDATION_BATCH

_SALT = "commitment.key"


class OwnRows(Protocol):
    """The rows of one file: ids, and labels where something is learned; or pairs of rows."""

    @property
    def row_count(self) -> int:
        """How many there are."""

    @property
    def rows_digest(self) -> str:
        """SHA-256 in hex of all of them."""

    def pick_rows(self, indices: Sequence[int]) -> Rows:
        """Some of them."""


@dataclass(frozen=True)
class ClientTextsRead:
    """What a client's files have become.

    Attributes:
        tokenizer: Digest of what decides the tokens of a text, the same for all clients.
    """

    draws: "ClientDraws"
    tokenizer: str


@dataclass(frozen=True)
class LabelledTextRows:
    """Labelled texts as rows, one each."""

    rows: LabelledRows

    @property
    def row_count(self) -> int:
        """Texts."""
        return self.rows.row_count

    @property
    def rows_digest(self) -> str:
        """SHA-256 in hex of all of them."""
        return self.rows.rows_digest

    def pick_rows(self, indices: Sequence[int]) -> Rows:
        """Some of them."""
        return (*self.rows.pick_rows(indices), NO_EXTRAS)


class ClientDraws:
    """The texts of one client; draw k of a run depends on texts, seed and k only.

    Args:
        rows: Texts of a microbatch, or pairs of answers.
    """

    def __init__(self, train: OwnRows, test: OwnRows, microbatches: Sequence[int], rows: int, seed: int) -> None:
        self.own_microbatches = tuple(microbatches)
        self._train, self._test, self._rows, self._seed = train, test, rows, seed

    def draw_rows(self, draw: int) -> list[Rows]:
        """The rows of a draw, an entry for each microbatch of this client."""
        count = self._rows * len(self.own_microbatches)
        indices = sample_indices(draw * count, count, self._train.row_count, self._seed)
        return [self._train.pick_rows(indices[start : start + self._rows]) for start in range(0, count, self._rows)]

    def held_out(self) -> Iterator[Rows]:
        """All held-out texts, some at a time."""
        count = self._test.row_count
        for start in range(0, count, VALIDATION_BATCH):
            yield self._test.pick_rows(range(start, min(start + VALIDATION_BATCH, count)))

    def texts_commitment(self, directory: Path) -> str:
        """Return a digest of the texts under a secret of this client's, which is made at the first start.

        Without the secret nothing can be learned from it, not even whether a guessed text is there.
        """
        path = directory / _SALT
        if not path.exists():
            write_private(path, secrets.token_bytes(32))
        salt = read_private(path, "the client makes it at its first start")
        digests = f"{self._train.rows_digest}{self._test.rows_digest}".encode()
        return hashlib.sha256(in_domain("client-texts/1", salt + digests)).hexdigest()


def read_texts(
    client: ClientFile, run: SplitRun, name: str, source: ModelSource, tell: Callable[[str], None]
) -> ClientTextsRead:
    """Read and encode a client's own files.

    Args:
        tell: Takes lines for the client's people.
    """
    if isinstance(run.data.tokenizer, BpeConfig):
        raise ConfigError('data.tokenizer: kind = "bpe" needs the texts of all clients; use "model" or "file"')
    paths = Path(client.train), Path(client.test)
    rows: Sequence[OwnRows]
    if run.data.preferences is not None:
        rows, rendering = read_preferences(run, source, client.preference_files, client.state_directory, tell)
    elif run.data.conversations is None:
        example_sets = load_own(*paths, client.text_columns(run))
        tokenizer = load_tokenizer(run.data.tokenizer, source.tokenizer_path)
        check_vocabulary(tokenizer.vocab_size, source.vocab_size)
        rows = [
            LabelledTextRows(encode_rows(examples, tokenizer, run.data.sequence_length)) for examples in example_sets
        ]
        rendering = tokenizer_digest(run, source)
    else:
        rows, rendering = read_conversations(run, source, cache_beside(client.state_directory) / "data", paths)
    mine = microbatches_of(name, run.train.microbatches, run.split.client_names)
    at_once = run.train.draws_per_step // run.train.microbatches
    return ClientTextsRead(ClientDraws(rows[0], rows[1], mine, at_once, run.train.seed), rendering)


def tokenizer_digest(run: RunConfig, source: ModelSource) -> str:
    """Return what decides the tokens of a labelled text, the same for all clients."""
    return fingerprint_tokenizer(run.data.tokenizer, source.tokenizer_path)
