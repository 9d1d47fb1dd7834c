"""A run that learns several objectives at once: ``[data]`` with ``train.objective``, and each of ``[[objectives]]``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError

from phalanx.config import StrictModel
from phalanx.data import DataConfig, FileTokenizerConfig, TokenizerConfig
from phalanx.data.chat.settings import ConversationsConfig, PreferencesConfig
from phalanx.data.config import HELD_OUT
from phalanx.data.sources import SourceConfig
from phalanx.objectives import OBJECTIVES, MixedSettings, ObjectiveSettings, SingleObjective, kind_of
from phalanx.train.runs.base import Faults, PrivateBase
from phalanx.train.runs.support import WEIGHTED_OBJECTIVE

MAIN = "main"
"""What the objective of ``[train]`` is called where there are others."""


class FurtherData(StrictModel):
    """What a further objective learns from; one of the first three is there.

    Its tokenizer, the length of its rows and the attention in them are those of ``[data]``.

    Attributes:
        sources: Text, packed as ``data.packing`` says.
        conversations: The assistant's turns are learned.
        preferences: Which of two answers is better, or whether one is wanted.
        validation_share: Share that is held out, measured as a validation set with the name of the objective.
        max_documents: Stop after so many different documents, over all sources.
        max_validation_sequences: At most so many held-out sequences are used, spread evenly.
    """

    sources: tuple[SourceConfig, ...] = ()
    conversations: ConversationsConfig | None = None
    preferences: PreferencesConfig | None = None
    validation_share: float = Field(default=0.05, ge=0.0, le=0.5, allow_inf_nan=False)
    max_documents: int | None = Field(default=None, ge=1)
    max_validation_sequences: int = Field(default=64, ge=1)

    def with_tokenizer(self, main: DataConfig, tokenizer: TokenizerConfig) -> DataConfig:
        """Return the section ``[data]`` of a run that learns from this alone."""
        return DataConfig(
            sources=self.sources,
            conversations=self.conversations,
            preferences=self.preferences,
            tokenizer=tokenizer,
            sequence_length=main.sequence_length,
            validation_share=self.validation_share,
            max_documents=self.max_documents,
            max_validation_sequences=self.max_validation_sequences,
            packing=main.packing if self.sources else "concatenate",
            # a row with one answer is one document
            attention="across" if self.preferences is not None else main.attention,
        )


class FurtherObjective(StrictModel):
    """An entry of ``[[objectives]]``: an objective beside ``train.objective``, with its data."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,39}$")]
    """Name in metrics, summary, report and TensorBoard; that of its validation set too."""
    objective: SingleObjective = "causal_lm"
    """What is learned, as ``train.objective``: one of text or of pairs."""
    weight: float = Field(default=1.0, gt=0.0, le=1e6, allow_inf_nan=False)
    """Of its mean loss in that of a step, where that of ``train.objective`` has 1."""
    microbatches: int = Field(ge=1)
    """How many of ``train.microbatches`` are of its rows."""
    data: FurtherData
    """What it is learned from."""

    @property
    def learns_pairs(self) -> bool:
        """Whether two of its rows belong together."""
        return OBJECTIVES[kind_of(self.objective)].target == "pair"


@dataclass(frozen=True)
class ObjectiveShare:
    """One objective's share of a step: its rows, and the weight of its mean loss."""

    name: str
    objective: str | ObjectiveSettings
    weight: float
    rows: int


class MixedBase(PrivateBase):
    """A run that may learn several objectives at once."""

    objectives: tuple[FurtherObjective, ...] = Field(default=(), max_length=16)

    @property
    def learned_objective(self) -> str | ObjectiveSettings:
        if not self.objectives:
            return self.train.objective
        return MixedSettings(parts=tuple(share.objective for share in self.objective_shares))

    @property
    def objective_shares(self) -> tuple[ObjectiveShare, ...]:
        """Each objective's share of a step, that of ``[train]`` first."""
        train = self.train
        rows = train.batch_size // train.microbatches
        further = tuple(
            ObjectiveShare(one.name, one.objective, one.weight, rows * one.microbatches) for one in self.objectives
        )
        rest = train.batch_size - sum(share.rows for share in further)
        return (ObjectiveShare(MAIN, train.objective, 1.0, rest), *further)

    @property
    def main_rows(self) -> int:
        return self.objective_shares[0].rows

    @property
    def validation_names(self) -> tuple[str, ...]:
        return (*super().validation_names, *(one.name for one in self.objectives if one.data.validation_share))

    def run_of(self, further: FurtherObjective, tokenizer: TokenizerConfig) -> Self:
        """Return the run as if it learned a further objective alone.

        Args:
            tokenizer: Tokenizer of the run, which its own text may have trained.
        """
        train = self.train.model_copy(update={"objective": further.objective})
        data = further.data.with_tokenizer(self.data, tokenizer)
        return self.model_copy(update={"data": data, "train": train, "objectives": ()})

    def _faults(self) -> Faults:
        if self.objectives and self.privacy is not None:
            yield "[privacy] excludes [[objectives]]: its bound is of the rows of one objective; remove one"
        yield from super()._faults()
        if not self.objectives:
            return
        if self.train.epochs is not None:
            yield "train.epochs: each of [[objectives]] has passes of its own; set train.steps"
        main = self.train.objective_kind
        if _kind_fault(main) is not None or OBJECTIVES[main].target == "pair":
            yield (
                f'train.objective = "{main}" excludes [[objectives]]: beside others it is to be "causal_lm" or '
                f'"{WEIGHTED_OBJECTIVE}"; learn from text or conversations of [data], and from preferences in '
                "[[objectives]]"
            )
        taken = sum(one.microbatches for one in self.objectives)
        if taken >= self.train.microbatches:
            yield (
                f"objectives: {taken} microbatches of train.microbatches = {self.train.microbatches} leave none for "
                "train.objective; raise train.microbatches, or lower objectives.microbatches"
            )
        names = [one.name for one in self.objectives]
        for number, one in enumerate(self.objectives):
            reserved = (MAIN, HELD_OUT, *(entry.name for entry in self.data.validation), *names[:number])
            if one.name in reserved:
                yield f'objectives.{number}.name = "{one.name}" is taken; choose another name'
            for fault in self._entry_faults(one):
                yield f"objectives.{number}.{fault}"

    def _entry_faults(self, one: FurtherObjective) -> Faults:
        kind, data, train = kind_of(one.objective), one.data, self.train
        if (fault := _kind_fault(kind)) is not None:
            yield f'objective = "{kind}": {fault}'
            return
        try:
            data.with_tokenizer(self.data, _ANY_TOKENIZER)
        except ValidationError as exc:
            yield "data: " + "; ".join(error["msg"].removeprefix("Value error, ") for error in exc.errors())
            return
        if one.learns_pairs != (data.preferences is not None):
            reason = "reads preferences; set data.preferences" if one.learns_pairs else "reads no preferences"
            yield f'objective = "{kind}" {reason}'
        copies, _ = self.row_cuts
        if one.learns_pairs and train.batch_size % (2 * train.microbatches * copies):
            yield (
                f"microbatches: train.batch_size = {train.batch_size} rows are in pairs, which {train.microbatches} "
                f"microbatches of {copies} copies would split; make it a multiple of {2 * train.microbatches * copies}"
            )
        is_weighted = data.conversations is not None and data.conversations.weighted
        if is_weighted != (kind == WEIGHTED_OBJECTIVE):
            yield (
                f'objective = "{kind}": only "{WEIGHTED_OBJECTIVE}" reads the weights of data.conversations with '
                "weighted = true; set both or neither"
            )


_ANY_TOKENIZER = FileTokenizerConfig(path=Path("tokenizer.json"))


def _kind_fault(kind: str) -> str | None:
    """Say why an objective is not learned beside others; None where it is."""
    objective = OBJECTIVES.get(kind)
    if objective is None:
        return "code of your own is learned alone; name an objective of this package"
    if objective.head != "lm" or objective.own_head:
        return "it needs another head than a language model's; learn it in a run of its own"
    if objective.rewriting is not None:
        return "it makes rows of its own; learn it in a run of its own"
    if objective.target == "sequence":
        return "it learns from texts that the model writes; learn it in a run of its own"
    return None
