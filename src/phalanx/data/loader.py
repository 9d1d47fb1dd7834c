"""Batches of a run in one order, the few integers that a checkpoint keeps of it, and the held-out batches."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.data.batch import DOCUMENTS, IGNORE, Batch
from phalanx.data.corpus import Corpus
from phalanx.data.order import NO_CURRICULA, Group, Phase, RunOrder
from phalanx.errors import CheckpointError, ConfigError, DataError

_WHOLE = "corpus_digest"
"""Key of a loader's state with the whole digest, beside the bits of it that states had before."""


class Sequences(Protocol):
    """The training sequences that a loader draws from."""

    @property
    def digest(self) -> str:
        """SHA-256 in hex of all that is in it."""

    @property
    def num_train_sequences(self) -> int:
        """At least 1."""

    def train_batch(self, indices: Sequence[int]) -> Batch:
        """Training sequences by number."""


class HeldOut(Protocol):
    """The held-out sequences that a model is measured on."""

    @property
    def num_validation_sequences(self) -> int:
        """0 when nothing is held out."""

    def validation_batch(self, indices: Sequence[int]) -> Batch:
        """Held-out sequences by number."""


class Rewrite(Protocol):
    """What an objective makes of packed rows: the same of the same rows, places and seed."""

    def __call__(self, batch: Batch, samples: Sequence[int], phases: Sequence[int], *, held_out: bool = False) -> Batch:
        """Return the batch that is learned.

        Args:
            samples: The number of each row in the run, or among the held-out rows.
            phases: The number of each row's phase.
        """


class RewrittenHeldOut:
    """Held-out sequences as an objective makes them, the same in every validation."""

    def __init__(self, sequences: HeldOut, rewrite: Rewrite) -> None:
        self._sequences = sequences
        self._rewrite = rewrite

    @property
    def num_validation_sequences(self) -> int:
        """As `HeldOut` says."""
        return self._sequences.num_validation_sequences

    def validation_batch(self, indices: Sequence[int]) -> Batch:
        """See `HeldOut`; rows have the layout of the first phase."""
        batch = self._sequences.validation_batch(indices)
        return self._rewrite(batch, list(indices), [0] * len(indices), held_out=True)


class BatchLoader:
    """Training batches without end, in an order that is computed: an epoch has each sequence once.

    Sample k of a run depends on corpus, seed, phases and k only, so a resumed run sees exactly the batches that it
    would have seen, none lost and none doubled, on any number of ranks and even with another batch size.

    Args:
        corpus: Source of sequences; a `Corpus` also has phases, and left-out batches.
        share: (number, of so many): of each group only every so manyth sequence is drawn, so that loaders of different
            numbers have none in common.
        rewrite: Turns each batch into learned rows; None where packed rows are learned.
    """

    def __init__(
        self,
        corpus: Sequences,
        batch_size: int,
        seed: int,
        share: tuple[int, int] = (0, 1),
        rewrite: Rewrite | None = None,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"train.batch_size={batch_size}: expected at least 1")
        self._share_sequences: Sequence[int] | NDArray[np.int64] = range(share[0], corpus.num_train_sequences, share[1])
        self._share = share
        if not len(self._share_sequences):
            raise ConfigError(
                f"data: {corpus.num_train_sequences} training sequences cannot be divided among {share[1]}; add text"
            )
        self._corpus = corpus
        self._batch_size = batch_size
        self._seed = seed
        self._num_samples = 0
        self._rewrite = rewrite
        if isinstance(corpus, Corpus):
            self._order = corpus.sample_order(seed, batch_size, share)
            self._share_sequences = corpus.shared_sequences(share)
        else:
            self._order = RunOrder(
                [Group("", len(self._share_sequences), corpus.digest, _no_scores)], [Phase(None, (1.0,))], seed
            )
        self._skip = corpus.layout.skip if isinstance(corpus, Corpus) else ()

    @property
    def corpus_digest(self) -> str:
        """SHA-256 in hex of all that batches are drawn from."""
        return self._corpus.digest

    def next_batch(self) -> Batch:
        """The next batch, ``[batch_size, seq]``."""
        samples, sequences = self._draw_batch()
        schedule = self._order.schedule
        batch = limit_spans(self._corpus.train_batch(sequences), schedule.attention_spans(samples))
        if self._rewrite is None:
            return batch
        return self._rewrite(batch, samples.tolist(), schedule.phase_numbers(samples))

    def next_sequences(self) -> list[int]:
        """The sequences of the next batch: it is drawn as `next` does, and not read."""
        return self._draw_batch()[1]

    @property
    def consumed_samples(self) -> dict[str, int]:
        """Return the samples of each group so far, by its name, with the samples of skipped batches."""
        return self._order.consumed_by_group(self._num_samples)

    def position_state(self) -> dict[str, Any]:
        """Samples drawn so far, and what identifies the order that they were drawn from."""
        state: dict[str, Any] = {
            "num_samples": self._num_samples,
            **self._order_identity(),
            _WHOLE: self._corpus.digest,
        }
        if self._is_mixed:
            state["groups"] = self._order.mixture_history(self._num_samples)
        return state

    def load_position(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken.

        Raises:
            CheckpointError: The state is malformed, from another seed, or from other sequences than this run would have
                seen until there.
        """
        identity, digest = self._order_identity(), self._corpus.digest
        # states from before it was written have its first bits alone; groups are compared one by one
        if not self._is_mixed and state.get(_WHOLE, digest) != digest:
            raise CheckpointError(
                f"loader state: belongs to the corpus {state[_WHOLE]!s:.80}, but this run has {digest}; resume with "
                "the data of the run that was saved"
            )
        state = {name: value for name, value in state.items() if name != _WHOLE}
        if self._is_mixed and "groups" not in state:
            state = _of_one_group(state)
        expected = {"num_samples", *identity, *(["groups"] if self._is_mixed else [])}
        if set(state) != expected:
            raise CheckpointError(f"loader state: found keys {sorted(state)}, expected {', '.join(sorted(expected))}")
        for name, value in identity.items():
            if state[name] != value:
                raise CheckpointError(
                    f"loader state: {name} is {state[name]}, but this run has {value}; resume with the data and the "
                    "seed of the run that was saved"
                )
        num_samples = state["num_samples"]
        if type(num_samples) is not int or num_samples < 0:
            raise CheckpointError(f"loader state: num_samples is {num_samples!r}, expected an integer from 0")
        if self._is_mixed:
            _check_history(state["groups"], self._order.mixture_history(num_samples), num_samples)
        self._num_samples = num_samples

    @property
    def _is_mixed(self) -> bool:
        """Whether groups or curricula are behind the samples, which older states know nothing of."""
        return self._order.is_mixed

    def _draw_batch(self) -> tuple[NDArray[np.int64], list[int]]:
        samples = self._next_samples()
        sequences = [int(self._share_sequences[index]) for index in self._order.sample_sequences(samples).tolist()]
        self._num_samples = int(samples[-1]) + 1
        return samples, sequences

    def _next_samples(self) -> NDArray[np.int64]:
        """Return the numbers of the next batch's samples, without the skipped ones."""
        samples = self._num_samples + np.arange(self._batch_size, dtype=np.int64)
        for first, behind in self._skip:
            start, stop = first * self._batch_size, behind * self._batch_size
            samples[samples >= start] += max(0, stop - max(start, self._num_samples))
        return samples

    def _order_identity(self) -> dict[str, int]:
        number, shares = self._share
        share_fields = {} if shares == 1 else {"share": number, "shares": shares}
        if self._is_mixed:
            return {"seed": self._seed, **share_fields}
        # 53 bits, so that a reader that takes JSON numbers for doubles keeps it whole
        corpus = int(self._corpus.digest[:13], 16)
        return {"seed": self._seed, "num_sequences": self._corpus.num_train_sequences, "corpus": corpus, **share_fields}


def limit_spans(batch: Batch, spans: Sequence[int | None]) -> Batch:
    """Return a batch in which attention spans no more tokens than each row's phase says."""
    if all(span is None for span in spans):
        return batch
    documents = batch.extras[DOCUMENTS]
    begins = torch.zeros_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    for row, span in enumerate(spans):
        if span is not None:
            begins[row, span::span] = True
    return replace(batch, extras={**batch.extras, DOCUMENTS: begins.cumsum(1)})


def _no_scores(by: str) -> NDArray[np.float64]:
    raise DataError(f"data: these sequences have no {by}")


def _of_one_group(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a run that began without curricula as one with them has it; a malformed one stays so."""
    if set(state) != {"num_samples", "seed", "num_sequences", "corpus"}:
        return dict(state)
    group_state = {
        "identity": [state["num_sequences"], state["corpus"]],
        "samples": state["num_samples"],
        "curricula": NO_CURRICULA,
    }
    groups = {"": group_state} if state["num_samples"] else {}
    return {"num_samples": state["num_samples"], "seed": state["seed"], "groups": groups}


def _check_history(history: object, expected: Mapping[str, Mapping[str, Any]], num_samples: int) -> None:
    """Return where a state's groups gave the samples that this run's phases would have taken of them."""
    if not isinstance(history, dict):
        raise CheckpointError(f"loader state: groups is {history!r:.80}, expected an object")
    for name, saved in history.items():
        if not isinstance(saved, dict) or set(saved) != {"identity", "samples", "curricula"}:
            raise CheckpointError(f"loader state: group {name!r:.80} is {saved!r:.80}, expected a loader's state")
    for name in sorted({*history, *expected}):
        saved, here = history.get(name), expected.get(name)
        if saved == here:
            continue
        had, has = (0 if state_of_group is None else state_of_group["samples"] for state_of_group in (saved, here))
        if had != has:
            why = f"it gave {had} of the first {num_samples} samples, but by these phases it would have given {has}"
        elif saved is not None and here is not None and saved["identity"] != here["identity"]:
            why = f"it gave {had} samples, but has changed: {saved['identity']} there, {here['identity']} here"
        else:
            why = "its samples so far came in the order of another curriculum or amount"
        raise CheckpointError(
            f'loader state: group "{name}": {why}; finished phases cannot change: restore the earlier phases and '
            "add one that begins here"
        )


def validation_batches(corpus: HeldOut, batch_size: int) -> Iterator[Batch]:
    """All validation sequences in order; the last batch may be smaller."""
    if batch_size < 1:
        raise ConfigError(f"validation batch size {batch_size}: expected at least 1")
    if corpus.num_validation_sequences == 0:
        raise DataError(
            "data: no held-out sequence; set data.validation_share above 0, or name a set in data.validation"
        )
    for start in range(0, corpus.num_validation_sequences, batch_size):
        stop = min(start + batch_size, corpus.num_validation_sequences)
        yield corpus.validation_batch(range(start, stop))


_CHUNK_TOKENS = 1 << 22
_BATCH_SIZE = 64


def unigram_perplexity(corpus: Corpus, counted: Corpus | None = None) -> float:
    """Perplexity of an add-one smoothed unigram model of the training tokens, on the validation labels.

    With `counted`, a corpus with the same tokenizer, the training tokens are that one's.
    ``exp(-mean(log((count + 1) / (tokens + vocab_size))))`` over all labels that count, in float64.
    """
    counts = np.ones(corpus.vocab_size, dtype=np.int64)
    for tokens in (counted or corpus).train_tokens:
        for start in range(0, len(tokens), _CHUNK_TOKENS):
            counts += np.bincount(tokens[start : start + _CHUNK_TOKENS], minlength=corpus.vocab_size)
    log_share = np.log(counts) - math.log(int(counts.sum()))
    total, num_labels = 0.0, 0
    for batch in validation_batches(corpus, _BATCH_SIZE):
        labels = batch.labels[batch.labels != IGNORE].numpy()
        total += float(log_share[labels].sum())
        num_labels += len(labels)
    return math.exp(-total / num_labels)
