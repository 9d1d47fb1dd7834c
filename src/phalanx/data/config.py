"""The configuration of a run's data; frozen, and free of torch and tokenizers."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from phalanx.config import StrictModel, one_of
from phalanx.config.strict import later_key
from phalanx.data.chat.settings import ConversationsConfig, PreferencesConfig
from phalanx.data.phases import (
    DatasetConfig,
    DatasetTokenizerConfig,
    DocumentAttention,
    GroupName,
    Packing,
    PhaseConfig,
    SkippedRange,
    check_phases,
    check_skipped,
)
from phalanx.data.sources import SourceConfig
from phalanx.data.tasks import TASKS


class BpeConfig(StrictModel):
    """A byte-level BPE vocabulary, trained on the training split: special tokens, 256 bytes, then merges."""

    kind: Literal["bpe"] = "bpe"
    vocab_size: int = Field(default=4096, ge=257)
    special_tokens: tuple[Annotated[str, Field(min_length=1, max_length=100)], ...] = later_key((), max_length=1000)
    """Tokens beside the end of text that no text can give: the mask, sentinels and marks of objectives."""

    @model_validator(mode="after")
    def _check_special_tokens(self) -> Self:
        odd = [token for token in self.special_tokens if token != token.strip() or self.special_tokens.count(token) > 1]
        if odd:
            raise ValueError(f"special_tokens: {odd[0]!r} appears twice, or has white space around it; list each once")
        return self


class ModelTokenizerConfig(StrictModel):
    """The tokenizer in the model's own directory; `eos_token` overrides its end token."""

    kind: Literal["model"] = "model"
    eos_token: str | None = Field(default=None, min_length=1)


class FileTokenizerConfig(StrictModel):
    """A ``tokenizer.json`` file; `eos_token` must be in its vocabulary."""

    kind: Literal["file"] = "file"
    path: Path
    eos_token: str = Field(default="<|endoftext|>", min_length=1)


TokenizerConfig = Annotated[
    BpeConfig | ModelTokenizerConfig | FileTokenizerConfig | DatasetTokenizerConfig, Field(discriminator="kind")
]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


FileOfEach = Annotated[
    # not strict: behind a validator of ours a list of texts is no JSON any more
    tuple[Annotated[Path, Field(strict=False)], ...], Field(strict=False), BeforeValidator(_as_list)
]
"""One path, or a list of them."""


class PromptSource(StrictModel):
    """A file of prompts, a JSON object a line.

    Attributes:
        ignore: Fields of a message that may be there and are not read; any other unknown one is an error.
    """

    path: Annotated[Path, Field(strict=False)]
    ignore: Annotated[tuple[str, ...], Field(strict=False)] = ()

    @model_serializer(mode="wrap")
    def _as_path(self, write: SerializerFunctionWrapHandler) -> Any:
        """Write a path alone where nothing is ignored, as it always was."""
        plain = write(self)
        return plain if self.ignore else plain["path"]


def _prompt_sources(value: object) -> object:
    listed = value if isinstance(value, list | tuple) else [value]
    return [{"path": entry} if isinstance(entry, str | Path) else entry for entry in listed]


PromptFiles = Annotated[tuple[PromptSource, ...], Field(strict=False), BeforeValidator(_prompt_sources)]
"""One file of prompts, or a list of them; each a path, or a section with `ignore`."""


class OwnTaskConfig(StrictModel):
    """Labelled texts of the clients' own: CSV (``.csv``), TSV or JSON lines, a file for each client.

    Attributes:
        classes: Names of all classes, in the order of their numbers. Clients agree on them here, where none has to
            show which it has; a label that is not among them is refused by the client that has it.
        text: Column, or field, of the text.
        label: Column, or field, of the class.
        train: Training texts of each client, in the order of their turns; empty where clients are remote.
        test: Held-out texts of each client; no training text of the same client.
    """

    classes: tuple[Annotated[str, Field(min_length=1, max_length=100)], ...] = Field(min_length=2, max_length=1000)
    text: str = Field(default="text", min_length=1)
    label: str = Field(default="label", min_length=1)
    train: FileOfEach = ()
    test: FileOfEach = ()

    @model_validator(mode="after")
    def _check_class_names(self) -> Self:
        if any(name != name.strip() for name in self.classes) or len(set(self.classes)) < len(self.classes):
            raise ValueError("classes: a name appears twice, or has white space around it; list each class once")
        if self.text == self.label:
            raise ValueError(f"text and label are both {self.text!r}; name two columns")
        if len(self.train) != len(self.test):
            raise ValueError(
                f"train names {len(self.train)} files, test {len(self.test)}; give one of each for every client, in "
                "the order of the clients"
            )
        return self


OWN_TASK = "own"
"""What a task of the clients' own is called in records."""


def _kind_of_task(value: object) -> str:
    return OWN_TASK if isinstance(value, dict | OwnTaskConfig) else "name"


TaskConfig = Annotated[
    Annotated[str, one_of(TASKS), Tag("name")] | Annotated[OwnTaskConfig, Tag(OWN_TASK)], Discriminator(_kind_of_task)
]


class LabelledConfig(StrictModel):
    """Labelled texts of one task, for the clients of a split: shared out to them, or files of their own.

    Attributes:
        task: Name of the task; or the files of a task of the clients' own, all texts of which are used.
        home: Folder of its files; left out, the usual places. Two tasks come with Python packages.
        texts_per_client: Training texts of each client: equal numbers, since clients take turns.
        test_texts: Held out, the same for every seed.
        alpha: Parameter of the Dirichlet distribution by which classes are shared out to clients, where a task has no
            silos of its own; small: each client has few classes, large: all are alike.
    """

    task: TaskConfig
    home: Path | None = None
    texts_per_client: int = Field(default=32, ge=1)
    test_texts: int = Field(default=160, ge=2)
    alpha: float = Field(default=0.5, gt=0.0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_own_keys(self) -> Self:
        written = sorted(self.model_fields_set - {"task"})
        if self.own_task is not None and written:
            raise ValueError(
                f"{', '.join(written)}: only for built-in tasks; with your own files all texts are used: remove it"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_shares(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what own files have no use for."""
        return {name: value for name, value in write(self).items() if self.own_task is None or name == "task"}

    @property
    def own_task(self) -> OwnTaskConfig | None:
        """The files of a task of the clients' own; None of a task by name."""
        return self.task if isinstance(self.task, OwnTaskConfig) else None

    @property
    def task_name(self) -> str:
        """What the task is called in records."""
        return self.task if isinstance(self.task, str) else OWN_TASK


HELD_OUT = "validation"
"""The name of the run's own held-out share among its validation sets."""


class ValidationSetConfig(StrictModel):
    """One more validation set: text that is measured by name, and never trained on by this run.

    Attributes:
        name: Name in metrics, summary, report and TensorBoard.
        sources: All their documents belong to the set; nothing compares them with the training text.
        max_sequences: At most so many sequences are used, spread evenly.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,39}$")
    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    max_sequences: int = Field(default=64, ge=1)


Passes = Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)]

_OF_TEXT = ("packing", "attention", "phases", "repeats", "skip")
_OF_SOURCES = ("validation_share", "max_documents", "max_validation_sequences", "validation")
_NOT_OF_CONVERSATIONS = ("packing", "phases", "repeats")


class DataConfig(StrictModel):
    """Where sequences come from, of which shape they are, and in which order a run sees them.

    One of `sources`, `labelled`, `dataset`, `conversations`, `preferences` and `prompts` is there.

    Attributes:
        sources: Read in this order; a document seen before is dropped.
        labelled: Texts of a classification task, for ``train.objective = "classification"``.
        preferences: Which of two answers is better, or whether one is wanted.
        conversations: The assistant's turns are learned; with ``attention = "document"`` several are put whole into a
            sequence, else each has one for itself.
        prompts: Files of JSON lines with a ``prompt`` each, for objectives that learn from the model's own texts.
        tokenizer: Trained here, the model's own, a file, or the one of the dataset.
        sequence_length: Tokens of one packed sequence; of a labelled text, the rest of which is cut off.
        validation_share: Share of the documents that is held out, drawn by content and seed; a dataset has a split.
        max_documents: Stop after so many different documents, over all sources.
        max_validation_sequences: At most so many held-out sequences are used, spread evenly.
        validation: Further validation sets, with sources of their own.
        packing: ``concatenate``: a sequence is cut out of all documents in a row; ``best_fit``: documents are put whole
            into the sequences that they fill best, and only longer ones are cut.
        attention: ``across``: attention reaches back over borders of documents; ``document``: it stays inside a
            document, in which positions count from 0.
        phases: Parts of the run with a mixture and a curriculum each; left out, one phase without an end.
        repeats: Passes over a group that the whole run takes at most; its weight then goes to the others.
        skip: Ranges of batches that the run leaves out.
    """

    sources: tuple[SourceConfig, ...] = ()
    labelled: LabelledConfig | None = None
    preferences: PreferencesConfig | None = later_key(None)
    dataset: DatasetConfig | None = later_key(None)
    conversations: ConversationsConfig | None = later_key(None)
    prompts: PromptFiles = later_key(())
    tokenizer: TokenizerConfig = DatasetTokenizerConfig()
    sequence_length: int = Field(ge=2)
    validation_share: float = Field(default=0.05, ge=0.0, le=0.5, allow_inf_nan=False)
    max_documents: int | None = Field(default=None, ge=1)
    max_validation_sequences: int = Field(default=64, ge=1)
    validation: tuple[ValidationSetConfig, ...] = ()
    packing: Packing = later_key("concatenate")
    attention: DocumentAttention = later_key("across")
    phases: tuple[PhaseConfig, ...] = later_key((), max_length=1000)
    repeats: dict[GroupName, Passes] = later_key({}, max_length=1000)
    skip: tuple[SkippedRange, ...] = later_key((), max_length=10_000)

    @property
    def validation_names(self) -> tuple[str, ...]:
        """Names of all validation sets, the held-out share first where there is one."""
        split = self.labelled is not None or self.dataset is not None
        split_names = (HELD_OUT,) if split or self.validation_share else ()
        return (*split_names, *(entry.name for entry in self.validation))

    @model_validator(mode="after")
    def _check_origin(self) -> Self:
        others = (self.labelled, self.dataset, self.conversations, self.preferences)
        if [bool(self.sources), bool(self.prompts), *(section is not None for section in others)].count(True) != 1:
            choices = "sources, labelled, dataset, conversations, preferences or prompts"
            raise ValueError(f"expected either {choices}; set one of them")
        names = [entry.name for entry in self.validation]
        twice = [name for name in names if names.count(name) > 1 or name == HELD_OUT]
        if twice:
            raise ValueError(
                f'validation: the name "{twice[0]}" appears twice or is "{HELD_OUT}", the name of the held-out '
                "share; choose another one"
            )
        if self.labelled is not None:
            self._refuse_keys(_OF_SOURCES, "is for sources; labelled texts have labelled.test_texts")
            self._refuse_keys(_OF_TEXT, "is for text; a labelled text is one row, and each is drawn once an epoch")
        if self.preferences is not None:
            self._refuse_keys(("validation",), "is for sources; of preferences a share is held out")
            self._refuse_keys(_OF_TEXT, "is for text; an answer with its prompt is one row")
        if self.prompts:
            self._refuse_keys(("max_documents", "validation"), "is for text; prompts are files of lines")
            self._refuse_keys(_OF_TEXT, "is for text; every text that is written has a row of its own")
        if self.dataset is not None:
            self._refuse_keys(
                ("validation_share", "max_documents"), "is for sources; a dataset was split when it was built"
            )
        if self.conversations is not None:
            why = 'is for text; conversations are packed by attention = "document"'
            self._refuse_keys(_NOT_OF_CONVERSATIONS, why)
        if self.dataset is None and isinstance(self.tokenizer, DatasetTokenizerConfig):
            raise ValueError('tokenizer: only a dataset has its own tokenizer; set kind = "bpe", "model" or "file"')
        if self.dataset is not None and isinstance(self.tokenizer, BpeConfig):
            raise ValueError('tokenizer: kind = "bpe" is trained on sources; a dataset has its own: remove it')
        return self

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        check_phases(self.phases, self.sequence_length, self.attention)
        check_skipped(self.skip)
        if self.dataset is None and (self.repeats or any(phase.weights for phase in self.phases)):
            raise ValueError("repeats and phases.weights name groups of a dataset; sources are one group: use dataset")
        return self

    def _refuse_keys(self, names: tuple[str, ...], why: str) -> None:
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} {why}: remove it")
