"""The configuration of a run's data; frozen, and free of torch and tokenizers."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from phalanx.config import StrictModel, one_of
from phalanx.data.sources import SourceConfig
from phalanx.data.tasks import TASKS


class BpeConfig(StrictModel):
    """A byte-level BPE vocabulary, trained on the training split: 256 bytes, end of text, then merges."""

    kind: Literal["bpe"] = "bpe"
    vocab_size: int = Field(default=4096, ge=257)


class ModelTokenizerConfig(StrictModel):
    """The tokenizer in the model's own directory; `eos_token` overrides the one that it names."""

    kind: Literal["model"] = "model"
    eos_token: str | None = Field(default=None, min_length=1)


class FileTokenizerConfig(StrictModel):
    """A ``tokenizer.json`` file; `eos_token` must be in its vocabulary."""

    kind: Literal["file"] = "file"
    path: Path
    eos_token: str = Field(default="<|endoftext|>", min_length=1)


TokenizerConfig = Annotated[BpeConfig | ModelTokenizerConfig | FileTokenizerConfig, Field(discriminator="kind")]


class LabelledConfig(StrictModel):
    """Labelled texts of one task, shared out to the clients of a split.

    Attributes:
        task: Which one.
        home: Folder of its files; left out, the usual places. Two tasks come with Python packages.
        texts_per_client: Training texts of each client: equal numbers, since clients take turns.
        test_texts: Held out, the same for every seed.
        alpha: Of the Dirichlet distribution by which classes are shared out to clients, where a task has no silos of
            its own; small: each client has few classes, large: all are alike.
    """

    task: Annotated[str, one_of(TASKS)]
    home: Path | None = None
    texts_per_client: int = Field(default=32, ge=1)
    test_texts: int = Field(default=160, ge=2)
    alpha: float = Field(default=0.5, gt=0.0, allow_inf_nan=False)


HELD_OUT = "validation"
"""The name of the run's own held-out share among its validation sets."""


class ValidationSetConfig(StrictModel):
    """One more validation set: text that is measured by name, and never trained on by this run.

    Attributes:
        name: In metrics, summary, report and TensorBoard.
        sources: All their documents belong to the set; nothing compares them with the training text.
        max_sequences: At most so many sequences are used, spread evenly.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,39}$")
    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    max_sequences: int = Field(default=64, ge=1)


class DataConfig(StrictModel):
    """Sources, tokenizer and the shape of the packed sequences; or labelled texts, one a row, in place of sources.

    Attributes:
        sources: Read in this order; a document seen before is dropped. Empty where there are labelled texts.
        labelled: Texts of a classification task, for ``train.objective = "classification"``.
        tokenizer: Trained here, the model's own, or a file.
        sequence_length: Tokens of one packed sequence; of a labelled text, the rest of which is cut off.
        validation_share: Share of the documents that is held out, drawn by content and seed.
        max_documents: Stop after so many different documents, over all sources.
        max_validation_sequences: At most so many held-out sequences are used, spread evenly.
        validation: Further validation sets, with sources of their own.
    """

    sources: tuple[SourceConfig, ...] = ()
    labelled: LabelledConfig | None = None
    tokenizer: TokenizerConfig
    sequence_length: int = Field(ge=2)
    validation_share: float = Field(default=0.05, ge=0.0, le=0.5, allow_inf_nan=False)
    max_documents: int | None = Field(default=None, ge=1)
    max_validation_sequences: int = Field(default=64, ge=1)
    validation: tuple[ValidationSetConfig, ...] = ()

    @property
    def validation_names(self) -> tuple[str, ...]:
        """Names of all validation sets, the held-out share first where there is one."""
        own = (HELD_OUT,) if self.labelled is not None or self.validation_share else ()
        return (*own, *(one.name for one in self.validation))

    @model_validator(mode="after")
    def _check_origin(self) -> Self:
        if bool(self.sources) == (self.labelled is not None):
            raise ValueError("expected either sources or labelled; give one of them")
        names = [one.name for one in self.validation]
        twice = [name for name in names if names.count(name) > 1 or name == HELD_OUT]
        if twice:
            raise ValueError(
                f'validation: the name "{twice[0]}" is taken, "{HELD_OUT}" being that of the held-out share; choose '
                "another one"
            )
        if self.labelled is None:
            return self
        for name in ("validation_share", "max_documents", "max_validation_sequences", "validation"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is for sources; labelled texts have labelled.test_texts: leave it out")
        return self
