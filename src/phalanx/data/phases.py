"""What a run file says of the order of its data: a dataset of shards, phases, limits and packing."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from phalanx.config import StrictModel
from phalanx.config.strict import later_key
from phalanx.data.sources.files import Location

GroupName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}\z")]
Weight = Annotated[float, Field(ge=0.0, le=1e9, allow_inf_nan=False)]
Weights = Annotated[dict[GroupName, Weight], Field(max_length=1000)]
Packing = Literal["concatenate", "best_fit"]
DocumentAttention = Literal["across", "document"]
_MAX_SAMPLES = 2**52


class DatasetTokenizerConfig(StrictModel):
    """The tokenizer that a dataset of shards was encoded with; it lies beside them."""

    kind: Literal["dataset"] = "dataset"


class StreamConfig(StrictModel):
    """Tokens of a dataset in an object store that are fetched when they are read, in place of a copy of all.

    Attributes:
        cache_bytes: Tokens that a process keeps in memory for further reads.
        max_fetched_bytes: The most that a process fetches from the store; left out, there is no such limit.
    """

    cache_bytes: int = Field(default=2**28, ge=2**22)
    max_fetched_bytes: int | None = Field(default=None, ge=1)


class DatasetConfig(StrictModel):
    """Token shards that ``phalanx data build`` has made.

    Attributes:
        path: Directory of the dataset, or its address in an object store, from where it is brought to the cache once.
        signer: Fingerprint of the key that must have signed its manifest; left out, any valid signature will do, and
            the console tells the fingerprint.
        groups: Those that are used; left out, all.
        stream: Fetches tokens of an address as they are read; left out, the dataset is copied.
        weights: Weight of each group in phases that give none; left out, its recipe's weights of the sources of each
            group, or, where one of them has none, the number of sequences of each group.
    """

    path: Location
    signer: str | None = Field(default=None, min_length=1, max_length=200)
    key_file: Path | None = None
    groups: Annotated[tuple[GroupName, ...], Field(max_length=1000)] = ()
    weights: Weights = Field(default={})
    stream: StreamConfig | None = later_key(None)

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if self.stream is not None and isinstance(self.path, Path):
            raise ValueError("stream: the dataset is in a directory, which is read in place; remove it")
        if len(set(self.groups)) < len(self.groups):
            raise ValueError("groups: a name appears twice; list each once")
        check_weights(self.weights, "weights")
        stray = sorted(set(self.weights) - set(self.groups)) if self.groups else []
        if stray:
            raise ValueError(f'weights: "{stray[0]}" is not among groups {", ".join(self.groups)}; add it there')
        return self


def check_weights(weights: Weights, where: str) -> None:
    """Return where there are no weights, or at least one above 0."""
    if weights and not any(weights.values()):
        raise ValueError(f"{where}: all are 0, so no sample can be drawn; give one group a weight above 0")


class UntilConfig(StrictModel):
    """The end of a phase, counted from the beginning of the run; one of the three.

    Attributes:
        steps: Batches; one that was skipped, or given up by the guard, counts.
    """

    steps: int | None = Field(default=None, ge=1, le=_MAX_SAMPLES)
    samples: int | None = Field(default=None, ge=1, le=_MAX_SAMPLES)
    tokens: int | None = Field(default=None, ge=1, le=_MAX_SAMPLES)

    @model_validator(mode="after")
    def _check_one_limit(self) -> Self:
        if len([limit for limit in (self.steps, self.samples, self.tokens) if limit is not None]) != 1:
            raise ValueError("until: set one of steps, samples and tokens")
        return self

    def in_samples(self, batch_size: int, sequence_length: int) -> int:
        """The end in samples, at least 1."""
        if self.samples is not None:
            return self.samples
        return max(1, (self.steps or 0) * batch_size if self.tokens is None else self.tokens // sequence_length)


class CurriculumConfig(StrictModel):
    """An order of sequences within a phase.

    Attributes:
        by: ``length``, the tokens of a document, ``place``, its number in the dataset, or a field of the dataset's
            documents that holds numbers, such as ``quality``. A sequence of several documents has their mean, weighed
            by tokens.
        buckets: Parts of equal size, in the order of the score; within one the order is random.
    """

    by: str = Field(min_length=1, max_length=100)
    buckets: int = Field(default=16, ge=2, le=2**16)
    descending: bool = False


class PhaseConfig(StrictModel):
    """A part of the run with a mixture and an order of its own.

    Attributes:
        until: Its end; left out of the last phase, which has none.
        weights: Weight of each group; a group that is not named has no sample in the phase. Left out: those of the
            dataset.
        curriculum: Left out: a random order.
        amount: Share of each group's sequences that the phase draws from; they are drawn by the seed, and a larger
            share has those of a smaller one. Where it changes, a pass over the new share begins.
        sequence_length: Tokens that attention spans at most in this phase, a divisor of ``data.sequence_length``: rows
            keep their shape and are cut into parts that do not see each other.
    """

    until: UntilConfig | None = None
    weights: Weights = Field(default={})
    curriculum: CurriculumConfig | None = None
    amount: float = later_key(1.0, gt=0.0, le=1.0, allow_inf_nan=False)
    sequence_length: int | None = Field(default=None, ge=2)

    @model_validator(mode="after")
    def _check_phase_weights(self) -> Self:
        check_weights(self.weights, "weights")
        return self


SkippedRange = tuple[
    Annotated[int, Field(ge=0, le=_MAX_SAMPLES, strict=True)],
    Annotated[int, Field(ge=1, le=_MAX_SAMPLES, strict=True)],
]
"""Batches that a run leaves out: the first one, and the one behind the last, counted from 0."""


def check_phases(phases: tuple[PhaseConfig, ...], sequence_length: int, attention: DocumentAttention) -> None:
    """Return where phases follow each other."""
    for number, phase in enumerate(phases):
        is_last = number == len(phases) - 1
        if is_last != (phase.until is None):
            what = "is the last phase, which has no end: remove until" if is_last else "has no end: set until"
            raise ValueError(f"phases.{number}: {what}")
        short = phase.sequence_length
        if short is None:
            continue
        if attention != "document":
            raise ValueError(
                f"phases.{number}.sequence_length = {short}: shorter rows need attention within documents; set "
                'data.attention = "document"'
            )
        if short > sequence_length or sequence_length % short:
            raise ValueError(
                f"phases.{number}.sequence_length = {short} does not divide data.sequence_length = "
                f"{sequence_length}; use a divisor"
            )


def check_skipped(skip: tuple[SkippedRange, ...]) -> None:
    """Return where ranges are in order and none is empty."""
    behind = 0
    for start, stop in skip:
        if start >= stop or start < behind:
            raise ValueError(
                f"skip: [{start}, {stop}] is empty, or overlaps the range before it; give ascending ranges [first "
                "batch, last batch + 1]"
            )
        behind = stop
