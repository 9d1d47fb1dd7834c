"""Labelled texts as the loader and the loop know sequences: one text a row, its class at its last token."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from phalanx.data import Batch, DataConfig
from phalanx.data.config import BpeConfig, OwnTaskConfig
from phalanx.data.tasks import TASKS, ClientShares, Columns, Example, load_own, share_out
from phalanx.data.tokenizers import TextTokenizer, load_tokenizer, train_bpe, vocabulary_digest
from phalanx.errors import ConfigError, DataError
from phalanx.objectives import mark_classes


@dataclass(frozen=True)
class LabelledRows:
    """Texts as tensors.

    Attributes:
        ids: ``[texts, tokens]``, int64, padded behind.
        labels: The same shape; each text's class at its last token.
    """

    ids: Tensor
    labels: Tensor
    classes: tuple[int, ...]

    @property
    def row_count(self) -> int:
        """Texts."""
        return len(self.classes)

    def pick_rows(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Ids and labels of some texts."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        return self.ids[chosen], self.labels[chosen]

    def make_batch(self, indices: Sequence[int]) -> Batch:
        """Some texts as a batch."""
        if not all(0 <= index < len(self.classes) for index in indices):
            raise DataError(f"texts {list(indices)[:5]} are out of range; expected 0 to {len(self.classes) - 1}")
        return Batch(*self.pick_rows(indices), tuple(indices))

    @cached_property
    def rows_digest(self) -> str:
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
        return self.rows.rows_digest

    @property
    def num_train_sequences(self) -> int:
        """As `Sequences` says."""
        return len(self.rows.classes)

    def train_batch(self, indices: Sequence[int]) -> Batch:
        """As `Sequences` says."""
        return self.rows.make_batch(indices)


@dataclass(frozen=True)
class LabelledTexts:
    """A task's texts, shared out and encoded.

    Attributes:
        classes: Names; a label is an index of them.
        shares: The same as words, for models that read those.
        holders: The client that has each held-out text; empty where they belong to no client.
    """

    classes: tuple[str, ...]
    clients: Mapping[str, ClientTexts]
    test: LabelledRows
    shares: ClientShares
    tokenizer: TextTokenizer
    holders: tuple[str, ...] = ()

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return self.tokenizer.vocab_size

    @cached_property
    def vocabulary_digest(self) -> str:
        """SHA-256 in hex over what decides the ids of a text."""
        return vocabulary_digest(self.tokenizer)

    @property
    def num_validation_sequences(self) -> int:
        """Held-out texts."""
        return len(self.test.classes)

    def validation_batch(self, indices: Sequence[int]) -> Batch:
        """Held-out texts by number."""
        return self.test.make_batch(indices)


def prepare_labelled(
    data: DataConfig, clients: Sequence[str], seed: int, tokenizer_path: Path | None = None
) -> LabelledTexts:
    """Load a task, share it out to clients or read their own files, and encode it.

    Args:
        data: Needs the section `labelled`.

    Raises:
        DataError: The task's files or package are missing or malformed, or there are too few texts.
        ConfigError: A tokenizer of kind "model" and no model directory, or not one file for each client.
    """
    labelled = data.labelled
    if labelled is None:
        raise DataError("data.labelled: missing; add it with the task")
    holders: tuple[str, ...] = ()
    if labelled.own_task is None:
        num_clients = len(clients)
        task = TASKS[labelled.task_name].load(labelled.home)
        texts_per_client, test = labelled.texts_per_client, labelled.test_texts
        classes, shares = task.classes, share_out(task, num_clients, texts_per_client, test, labelled.alpha, seed)
    else:
        classes, (shares, holders) = labelled.own_task.classes, _own_shares(labelled.own_task, clients)
    if isinstance(data.tokenizer, BpeConfig):
        tokenizer = train_bpe((example.text for example in shares.train_examples), data.tokenizer)
    else:
        tokenizer = load_tokenizer(data.tokenizer, tokenizer_path)
    encoded = [encode_rows(examples, tokenizer, data.sequence_length) for examples in shares.clients]
    return LabelledTexts(
        classes,
        {name: ClientTexts(rows) for name, rows in zip(clients, encoded, strict=True)},
        encode_rows(shares.test, tokenizer, data.sequence_length),
        shares,
        tokenizer,
        holders,
    )


def _own_shares(own: OwnTaskConfig, clients: Sequence[str]) -> tuple[ClientShares, tuple[str, ...]]:
    """Read every client's files; return their texts, and which client has each held-out one."""
    if len(own.train) != len(clients):
        raise ConfigError(
            f"data.labelled.task.train: names {len(own.train)} files, but split.clients = {len(clients)}; give each "
            "client its own files"
        )
    columns = Columns(own.text, own.label, own.classes)
    pairs = [load_own(train, test, columns) for train, test in zip(own.train, own.test, strict=True)]
    held_out = [(example, name) for name, (_, test) in zip(clients, pairs, strict=True) for example in test]
    shares = ClientShares(tuple(train for train, _ in pairs), tuple(example for example, _ in held_out))
    return shares, tuple(name for _, name in held_out)


def encode_rows(examples: Sequence[Example], tokenizer: TextTokenizer, tokens: int) -> LabelledRows:
    """Encode whole texts as their tokenizer does, cut them to so many tokens and pad them behind."""
    encoded = tokenizer.encode_whole([example.text for example in examples], tokens)
    ids = torch.full((len(encoded), tokens), tokenizer.eos_id, dtype=torch.int64)
    for row, token_ids in enumerate(encoded):
        ids[row, : len(token_ids)] = torch.tensor(token_ids, dtype=torch.int64)
    classes = tuple(example.label for example in examples)
    return LabelledRows(ids, mark_classes(classes, [len(token_ids) for token_ids in encoded], tokens), classes)
