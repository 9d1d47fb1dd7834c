"""The sequences of a run: groups of tokens, packed into rows of one length, in the order that the run file asks for."""

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.data.batch import DOCUMENTS, Batch
from phalanx.data.config import DataConfig
from phalanx.data.order import Curriculum, Group, Phase, RunOrder, Scores
from phalanx.data.packing import BestFitRows, RowBlock, Rows, TokenArray, TokenSplit, Windows
from phalanx.data.phases import CurriculumConfig, DocumentAttention, Packing, PhaseConfig
from phalanx.data.shards import Dataset
from phalanx.data.sources import CanarySettings
from phalanx.data.tokenizers.tokenizer import open_tokenizer, vocabulary_digest
from phalanx.errors import ConfigError, DataError


@dataclass(frozen=True)
class SequenceLayout:
    """How tokens become sequences, and sequences a run.

    Attributes:
        max_validation_sequences: At most so many held-out ones are used, spread evenly.
        weights: Weight of each group in phases that give none.
        repeats: Passes that a group gives at most.
        weighted: Whether batches bring the weight of each label.
    """

    sequence_length: int
    max_validation_sequences: int = 64
    packing: Packing = "concatenate"
    attention: DocumentAttention = "across"
    phases: tuple[PhaseConfig, ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    repeats: Mapping[str, float] = field(default_factory=dict)
    skip: tuple[tuple[int, int], ...] = ()
    weighted: bool = False

    @classmethod
    def from_config(cls, config: DataConfig) -> Self:
        """Return the layout of a run file."""
        return cls(
            config.sequence_length,
            config.max_validation_sequences,
            config.packing,
            config.attention,
            config.phases,
            {} if config.dataset is None else config.dataset.weights,
            config.repeats,
            config.skip,
            config.conversations is not None and config.conversations.weighted,
        )


@dataclass(frozen=True)
class CorpusFacts:
    """What identifies a corpus.

    Attributes:
        digest: SHA-256 in hex of every token.
        vocab_size: One more than the largest token id.
        tokenizer_path: Its ``tokenizer.json``.
        trust: Description of a dataset's signer in one sentence; empty for text that was prepared here.
        canaries: Those that the recipe of a dataset has planted.
        dataset: The shards of its tokens.
    """

    digest: str
    vocab_size: int
    eos_id: int
    tokenizer_path: Path
    trust: str = ""
    canaries: CanarySettings | None = None
    dataset: Dataset | None = None


@dataclass(frozen=True)
class TokenGroup:
    """The tokens of one group.

    Attributes:
        name: Empty where a corpus is one group.
        digest: SHA-256 in hex of its training tokens.
    """

    name: str
    digest: str
    train: TokenSplit
    validation: TokenSplit


class Corpus:
    """Training and validation sequences of one fixed length, numbered over all groups.

    A sequence may hold several documents. No loss is taken across a border; attention reaches back over it, as in
    GPT-2's training, unless the layout says that it stays inside a document.

    Attributes:
        digest: SHA-256 in hex of every token, and of how documents are packed.
        vocab_size: One more than the largest token id.
        tokenizer_path: Its ``tokenizer.json``.
        trust: See `CorpusFacts`.
        num_validation_sequences: At most so many as the layout says; 0 when nothing is held out.
    """

    def __init__(self, facts: CorpusFacts, groups: Sequence[TokenGroup], layout: SequenceLayout) -> None:
        self.vocab_size, self.eos_id, self.tokenizer_path = facts.vocab_size, facts.eos_id, facts.tokenizer_path
        self.layout = layout
        self.trust, self.canaries, self.dataset = facts.trust, facts.canaries, facts.dataset
        self._groups = tuple(groups)
        self._train = _GroupedRows([_make_rows(group.train, layout) for group in groups])
        self._held_out = _GroupedRows([_held_out_rows(group.validation, layout.sequence_length) for group in groups])
        self.digest = _packing_digest(facts.digest, layout)
        self.num_train_sequences = self._train.num_rows
        self.num_validation_sequences = min(self._held_out.num_rows, layout.max_validation_sequences)
        for group, rows in zip(groups, self._train.parts, strict=True):
            if group.name and not rows.num_rows:
                raise DataError(
                    f'data: group "{group.name}" has {len(group.train.tokens)} tokens, but one sequence needs '
                    f"{layout.sequence_length + 1}; remove the group, or lower data.sequence_length"
                )

    @property
    def user_notes(self) -> tuple[str, ...]:
        """Sentences about it for a person."""
        return tuple(note for note in (self.trust, self._describe_beginning()) if note)

    def _describe_beginning(self) -> str:
        """Say whether documents begin with the token that the tokenizer writes before a text."""
        tokenizer = open_tokenizer(self.tokenizer_path, self.eos_id)
        first = list(tokenizer.first_ids)
        if not first or tokenizer.eos_id in first:
            return ""
        named = tokenizer.beginning_tokens
        tokens = self._groups[0].train.tokens
        if np.asarray(tokens[: len(first)]).tolist() == first:
            return f"documents begin with {named}, as the tokenizer's texts do"
        return (
            f"documents lack {named}, with which the tokenizer begins texts; a model that was trained with it may "
            "perform worse"
        )

    @cached_property
    def vocabulary_digest(self) -> str:
        """SHA-256 in hex over what decides the ids of a text."""
        return vocabulary_digest(open_tokenizer(self.tokenizer_path, self.eos_id))

    @property
    def train_tokens(self) -> list[TokenArray]:
        """All training tokens, ``[tokens]`` of each group, read-only."""
        return [group.train.tokens for group in self._groups]

    def sample_order(self, seed: int, batch_size: int, share: tuple[int, int] = (0, 1)) -> RunOrder:
        """Return the order in which a run sees the sequences, or the share of one of several loaders.

        Args:
            share: ``(number, shares)``: only every ``shares``-th sequence of each group, beginning with that number.

        Raises:
            ConfigError: A phase, a weight or a limit names a group that there is not, or a group has not a sequence for
                every share.
        """
        group_names = [group.name for group in self._groups]
        layout = self.layout
        _check_names([layout.weights, layout.repeats, *(phase.weights for phase in layout.phases)], group_names)
        number, shares = share
        sizes = [len(range(number, rows.num_rows, shares)) for rows in self._train.parts]
        for name, size in zip(group_names, sizes, strict=True):
            if not size:
                of_group = f' of group "{name}"' if name else ""
                raise ConfigError(f"data: the training sequences{of_group} cannot be divided among {shares}; add text")
        default = layout.weights or dict(zip(group_names, map(float, sizes), strict=True))
        phases = [
            Phase(
                None if phase.until is None else phase.until.in_samples(batch_size, layout.sequence_length),
                tuple((phase.weights or default).get(name, 0.0) for name in group_names),
                _make_curriculum(phase.curriculum),
                phase.sequence_length,
                phase.amount,
            )
            for phase in layout.phases or (PhaseConfig(),)
        ]
        groups = [
            Group(
                group.name, size, _packing_digest(group.digest, layout), partial(_share_scores, rows.mean_scores, share)
            )
            for group, size, rows in zip(self._groups, sizes, self._train.parts, strict=True)
        ]
        limits = [
            math.floor(layout.repeats[name] * size) if name in layout.repeats else None
            for name, size in zip(group_names, sizes, strict=True)
        ]
        return RunOrder(groups, phases, seed, limits)

    def shared_sequences(self, share: tuple[int, int]) -> NDArray[np.int64]:
        """Return the training sequences of a share, in the order in which `order` numbers them."""
        number, shares = share
        edges = self._train.edges
        return np.concatenate([np.arange(begin + number, stop, shares) for begin, stop in itertools.pairwise(edges)])

    def sequences_of(self, group: str, start: int, stop: int) -> list[int]:
        """Return the training sequences that have any of a group's tokens ``start .. stop - 1`` as an input."""
        for number, group_tokens in enumerate(self._groups):
            # what a run has made itself is one group, and nameless
            if group_tokens.name in ("", group):
                return self._train.rows_of_group(number, start, stop)
        return []

    def train_batch(self, indices: Sequence[int]) -> Batch:
        """Training sequences by number."""
        _check_numbers(indices, self.num_train_sequences)
        return self._make_batch(self._train, indices, indices)

    def validation_batch(self, indices: Sequence[int]) -> Batch:
        """Validation sequences by number, spread evenly over the held-out text when there are too many."""
        have, used = self._held_out.num_rows, self.num_validation_sequences
        _check_numbers(indices, used)
        return self._make_batch(self._held_out, indices, [index * have // max(used, 1) for index in indices])

    def _make_batch(self, part: "_GroupedRows", indices: Sequence[int], rows: Sequence[int]) -> Batch:
        block = part.read_group_rows(rows)
        extras = {DOCUMENTS: torch.from_numpy(block.documents)} if self.layout.attention == "document" else {}
        if self.layout.weighted and block.weights is not None:
            extras["weights"] = torch.from_numpy(block.weights)
        return Batch(torch.from_numpy(block.ids), torch.from_numpy(block.labels), tuple(indices), extras)


class _GroupedRows:
    """The rows of all groups as one list."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts = tuple(parts)
        self.edges = np.concatenate([[0], np.cumsum([rows.num_rows for rows in parts])]).astype(np.int64)
        self.num_rows = int(self.edges[-1])

    def rows_of_group(self, group: int, start: int, stop: int) -> list[int]:
        """Return the rows of all groups that hold any of one group's tokens."""
        row_numbers = self.parts[group].rows_holding(start, stop) + self.edges[group]
        return [int(number) for number in row_numbers]

    def read_group_rows(self, numbers: Sequence[int]) -> RowBlock:
        if len(self.parts) == 1:
            return self.parts[0].read_rows(numbers)
        row_numbers = np.asarray(numbers, dtype=np.int64)
        groups = np.searchsorted(self.edges, row_numbers, side="right") - 1
        order = np.argsort(groups, kind="stable")
        blocks = [
            self.parts[group].read_rows((row_numbers[groups == group] - self.edges[group]).tolist())
            for group in np.unique(groups)
        ]
        back = np.argsort(order, kind="stable")
        ids, labels, documents = (_join_blocks(blocks, name)[back] for name in ("ids", "labels", "documents"))
        return RowBlock(ids, labels, documents)


def _join_blocks(blocks: Sequence[RowBlock], name: str) -> NDArray[np.int64]:
    return np.concatenate([getattr(block, name) for block in blocks])


def _held_out_rows(split: TokenSplit, length: int) -> Rows:
    """Return rows that depend on no packing, so that packings can be compared: windows, or whole conversations."""
    return Windows(split, length) if split.weights is None else BestFitRows(split, length, alone=True)


def _make_rows(split: TokenSplit, layout: SequenceLayout) -> Rows:
    if split.weights is not None:
        return BestFitRows(split, layout.sequence_length, alone=layout.attention == "across")
    make = BestFitRows if layout.packing == "best_fit" else Windows
    return make(split, layout.sequence_length)


def _packing_digest(content: str, layout: SequenceLayout) -> str:
    """Return a digest of tokens and of how they are packed; as it always was where they are concatenated."""
    if layout.packing == "concatenate":
        return content
    return hashlib.sha256(f"{layout.packing} {layout.sequence_length} {content}".encode()).hexdigest()


def _share_scores(scores: Scores, share: tuple[int, int], by: str) -> NDArray[np.floating]:
    number, shares = share
    return scores(by)[number::shares]


def _make_curriculum(config: CurriculumConfig | None) -> Curriculum | None:
    return None if config is None else Curriculum(config.by, config.buckets, config.descending)


def _check_numbers(indices: Sequence[int], size: int) -> None:
    for index in indices:
        if not 0 <= index < size:
            raise DataError(f"sequence {index} is out of range; this split has 0 to {size - 1}")


def _check_names(named: Sequence[Mapping[str, float]], known: Sequence[str]) -> None:
    stray = sorted({name for group in named for name in group} - set(known))
    if stray:
        raise ConfigError(f'data: unknown group "{stray[0]}"; the dataset has {", ".join(known)}: name one of them')
