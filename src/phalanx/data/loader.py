"""Batches of a run in their one order, and the few integers that a checkpoint keeps of it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from phalanx.data.batch import Batch
from phalanx.data.order import sample_indices
from phalanx.errors import CheckpointError, ConfigError, DataError


class Sequences(Protocol):
    """The training sequences that a loader draws from."""

    @property
    def digest(self) -> str:
        """SHA-256 in hex of all that is in it."""
        ...

    @property
    def num_train_sequences(self) -> int:
        """At least 1."""
        ...

    def train_batch(self, indices: Sequence[int]) -> Batch:
        """Training sequences by number."""
        ...


class HeldOut(Protocol):
    """The held-out sequences that a model is measured on."""

    @property
    def num_validation_sequences(self) -> int:
        """0 when nothing is held out."""
        ...

    def validation_batch(self, indices: Sequence[int]) -> Batch:
        """Held-out sequences by number."""
        ...


class BatchLoader:
    """Training batches without end; each epoch is another permutation of all sequences.

    Sample k of a run depends on corpus, seed and k only, so a resumed run sees exactly the batches that it
    would have seen, none lost and none doubled, even with another batch size.

    Args:
        corpus: Where sequences come from.
        batch_size: Sequences of a batch.
        seed: Of the order.
        share: (number, of so many): only every so manyth sequence is drawn, so that loaders of different numbers have
            none in common.

    Raises:
        ConfigError: The batch size is not positive, or the corpus has not a sequence for every share.
    """

    def __init__(self, corpus: Sequences, batch_size: int, seed: int, share: tuple[int, int] = (0, 1)) -> None:
        if batch_size < 1:
            raise ConfigError(f"train.batch_size={batch_size}: expected at least 1")
        self._own = range(share[0], corpus.num_train_sequences, share[1])
        self._share = share
        if not self._own:
            raise ConfigError(
                f"data: {corpus.num_train_sequences} training sequences cannot be shared by {share[1]}; give more text"
            )
        self._corpus = corpus
        self._batch_size = batch_size
        self._seed = seed
        self._num_samples = 0

    @property
    def corpus_digest(self) -> str:
        """SHA-256 in hex of all that batches are drawn from."""
        return self._corpus.digest

    def next(self) -> Batch:
        """The next batch, ``[batch_size, seq]``."""
        indices = sample_indices(self._num_samples, self._batch_size, len(self._own), self._seed)
        batch = self._corpus.train_batch([self._own[index] for index in indices])
        self._num_samples += self._batch_size
        return batch

    def state(self) -> dict[str, int]:
        """Samples drawn so far, and what identifies the order that they were drawn from."""
        return {"num_samples": self._num_samples, **self._identity()}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Go on where a state was taken.

        Raises:
            CheckpointError: The state is malformed, or from another corpus or seed.
        """
        identity = self._identity()
        if set(state) != {"num_samples", *identity}:
            expected = ", ".join(sorted({"num_samples", *identity}))
            raise CheckpointError(f"loader state: found keys {sorted(state)}, expected {expected}")
        for name, value in identity.items():
            if state[name] != value:
                raise CheckpointError(
                    f"loader state: {name} is {state[name]}, this run has {value}; "
                    "resume with the data and the seed of the run that was saved"
                )
        num_samples = state["num_samples"]
        if type(num_samples) is not int or num_samples < 0:
            raise CheckpointError(f"loader state: num_samples is {num_samples!r}, expected an integer from 0")
        self._num_samples = num_samples

    def _identity(self) -> dict[str, int]:
        # 53 bits, so that a reader that takes JSON numbers for doubles keeps it whole
        corpus = int(self._corpus.digest[:13], 16)
        whole = {"seed": self._seed, "num_sequences": self._corpus.num_train_sequences, "corpus": corpus}
        number, shares = self._share
        return whole if shares == 1 else {**whole, "share": number, "shares": shares}


def validation_batches(corpus: HeldOut, batch_size: int) -> Iterator[Batch]:
    """All validation sequences in order; the last batch may be smaller.

    Raises:
        DataError: Nothing is held out.
        ConfigError: `batch_size` is not positive.
    """
    if batch_size < 1:
        raise ConfigError(f"validation batch size {batch_size}: expected at least 1")
    if corpus.num_validation_sequences == 0:
        raise DataError("data: no validation sequence is held out; set data.validation_share above 0")
    for start in range(0, corpus.num_validation_sequences, batch_size):
        stop = min(start + batch_size, corpus.num_validation_sequences)
        yield corpus.validation_batch(range(start, stop))
