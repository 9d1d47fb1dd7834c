"""Labelled texts as the loader and the loop know sequences: one text a row, its class at its last token."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from phalanx.data import Batch, DataConfig
from phalanx.data.config import BpeConfig
from phalanx.data.tasks import TASKS, Example, Shares, share_out
from phalanx.data.tokenizer import TextTokenizer, load_tokenizer, train_bpe
from phalanx.errors import DataError
from phalanx.objectives import mark_classes


@dataclass(frozen=True)
class LabelledRows:
    """Texts as tensors.

    Attributes:
        ids: ``[texts, tokens]``, int64, padded behind.
        labels: The same shape; each text's class at its last token.
        classes: Of each text.
    """

    ids: Tensor
    labels: Tensor
    classes: tuple[int, ...]

    def pick(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Ids and labels of some texts."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        return self.ids[chosen], self.labels[chosen]

    def batch(self, indices: Sequence[int]) -> Batch:
        """Some texts as a batch.

        Raises:
            DataError: There is no such text.
        """
        if not all(0 <= index < len(self.classes) for index in indices):
            raise DataError(f"texts {list(indices)[:5]} were asked for; there are 0 to {len(self.classes) - 1}")
        return Batch(*self.pick(indices), tuple(indices))

    @cached_property
    def digest(self) -> str:
        """SHA-256 in hex over ids and labels."""
        total = hashlib.sha256(repr(tuple(self.ids.shape)).encode())
        for tensor in (self.ids, self.labels):
            total.update(tensor.contiguous().numpy().tobytes())
        return total.hexdigest()


@dataclass(frozen=True)
class ClientTexts:
    """The texts of one client, as a loader draws them."""

    rows: LabelledRows

    @property
    def digest(self) -> str:
        """As `Sequences` says."""
        return self.rows.digest

    @property
    def num_train_sequences(self) -> int:
        """As `Sequences` says."""
        return len(self.rows.classes)

    def train_batch(self, indices: Sequence[int]) -> Batch:
        """As `Sequences` says."""
        return self.rows.batch(indices)


@dataclass(frozen=True)
class LabelledTexts:
    """A task's texts, shared out and encoded.

    Attributes:
        classes: Names; a label is an index of them.
        clients: Training texts by client.
        test: Held-out texts, which belong to no client.
        shares: The same as words, for models that read those.
        vocab_size: One more than the largest token id.
    """

    classes: tuple[str, ...]
    clients: Mapping[str, ClientTexts]
    test: LabelledRows
    shares: Shares
    vocab_size: int

    @property
    def num_validation_sequences(self) -> int:
        """Held-out texts."""
        return len(self.test.classes)

    def validation_batch(self, indices: Sequence[int]) -> Batch:
        """Held-out texts by number."""
        return self.test.batch(indices)


def prepare_labelled(
    data: DataConfig, clients: Sequence[str], seed: int, tokenizer_path: Path | None = None
) -> LabelledTexts:
    """Load a task, share it out to clients and encode it.

    Args:
        data: With a section `labelled`.
        clients: Party names.
        seed: Of the shares.
        tokenizer_path: The model's own, for a tokenizer of kind "model".

    Raises:
        DataError: The task's files or package are missing, or there are too few texts.
        ConfigError: A tokenizer of kind "model" and no model directory.
    """
    wanted = data.labelled
    if wanted is None:
        raise DataError("data.labelled: missing; it names the task")
    task = TASKS[wanted.task].load(wanted.home)
    shares = share_out(task, len(clients), wanted.texts_per_client, wanted.test_texts, wanted.alpha, seed)
    if isinstance(data.tokenizer, BpeConfig):
        tokenizer = train_bpe((example.text for example in shares.train), data.tokenizer)
    else:
        tokenizer = load_tokenizer(data.tokenizer, tokenizer_path)
    encoded = [encode_rows(examples, tokenizer, data.sequence_length) for examples in shares.clients]
    return LabelledTexts(
        task.classes,
        {name: ClientTexts(rows) for name, rows in zip(clients, encoded, strict=True)},
        encode_rows(shares.test, tokenizer, data.sequence_length),
        shares,
        tokenizer.vocab_size,
    )


def encode_rows(examples: Sequence[Example], tokenizer: TextTokenizer, tokens: int) -> LabelledRows:
    """Encode texts, cut them to so many tokens and pad them behind."""
    encoded = [ids[:tokens] for ids in tokenizer.encode([example.text for example in examples])]
    ids = torch.full((len(encoded), tokens), tokenizer.eos_id, dtype=torch.int64)
    for row, found in enumerate(encoded):
        ids[row, : len(found)] = torch.tensor(found, dtype=torch.int64)
    classes = tuple(example.label for example in examples)
    return LabelledRows(ids, mark_classes(classes, [len(found) for found in encoded], tokens), classes)
