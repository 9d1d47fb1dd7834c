"""The recipe of a dataset: strict TOML, like a run file, and free of everything that reads or cleans text."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter, create_model, model_validator

from phalanx.config import StrictModel, any_kind, check_relative_paths, is_own, load_config, pin_own_code
from phalanx.data.build.steps import STEPS
from phalanx.data.config import FileTokenizerConfig
from phalanx.data.rules import PiiConfig, RuleSettings
from phalanx.data.sources import SOURCES, OwnSourceConfig, SourceSettings
from phalanx.data.tokenizers import ByteBpeTraining, SentencePieceTraining, WordPieceTraining

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,39}$")]
"""Of a source, a group or a step: part of file names and of reports."""


class SourceTerms(StrictModel):
    """What a recipe says of any source beside its own keys.

    Attributes:
        name: Name in account, shards and reports; its kind when left out.
        group: The mixture group that its documents belong to; its name where it is left out.
        licence: Licence of its documents, as a person would write it; kept in the manifest.
        consent: On which ground the documents may be used; kept in the manifest.
        weight: Weight of its group in the mixture of a run that gives no weights; kept in the manifest.
    """

    name: Name | None = None
    group: Name | None = None
    licence: str = Field(default="not stated", min_length=1, max_length=200)
    consent: str = Field(default="not stated", min_length=1, max_length=200)
    weight: float | None = Field(default=None, gt=0.0)


class StepTerms(StrictModel):
    """What a recipe says of any step beside its own keys.

    Attributes:
        label: Its name in account and reports; its kind where it is left out.
    """

    label: Name | None = None


def _combine_sections(terms: type[StrictModel], config: type[StrictModel]) -> type[StrictModel]:
    """Return a section with further keys."""
    return create_model(config.__name__, __base__=(terms, config), __module__=__name__)


if TYPE_CHECKING:

    class RecipeSource(SourceTerms, SourceSettings):
        """One source."""

    class RecipeStep(StepTerms, RuleSettings):
        """One step."""
else:
    # at run time the tables alone say which there are
    RecipeSource = any_kind(
        {name: _combine_sections(SourceTerms, row.config) for name, row in SOURCES.items()},
        _combine_sections(SourceTerms, OwnSourceConfig),
    )
    RecipeStep = any_kind({name: _combine_sections(StepTerms, row.config) for name, row in STEPS.items()})


def _default_steps() -> tuple[RecipeStep, ...]:
    read: TypeAdapter[tuple[RecipeStep, ...]] = TypeAdapter(tuple[RecipeStep, ...])
    return read.validate_python(({"kind": "unicode"}, {"kind": "exact_duplicates"}))


class QuarantineConfig(StrictModel):
    """What a person has decided of quarantined documents, by their names.

    Attributes:
        release: Scans let these documents pass.
        drop: These documents are dropped for good.
    """

    release: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_overlap(self) -> Self:
        overlap = sorted(set(self.release) & set(self.drop))
        if overlap:
            raise ValueError(f"{overlap[0]!r} is in release and in drop; remove it from one of them")
        return self


class OutputConfig(StrictModel):
    """Shape of the dataset.

    Attributes:
        validation_share: Share of the documents that is held out, drawn by content and seed.
        excerpt: Characters of a dropped or quarantined text that account and report show; 0 shows none. Left out: 300,
            and none where the shards are encrypted.
        key: File of the key that wraps the key of encrypted shards; left out, shards are not encrypted.
        signer: File of the key that signs the manifest, made where there is none; left out, that of the user.
    """

    shard_tokens: int = Field(default=1 << 25, ge=1024, le=1 << 40)
    validation_share: float = Field(default=0.05, ge=0.0, le=0.5)
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    excerpt: int | None = Field(default=None, ge=0, le=2000)
    key: Path | None = None
    signer: Path | None = None

    @property
    def excerpt_characters(self) -> int:
        """Characters of an excerpt."""
        return self.excerpt if self.excerpt is not None else 0 if self.key is not None else 300


class ModelVocabulary(StrictModel):
    """The tokenizer of a model: the directory of the model, or its ``tokenizer.json``."""

    kind: Literal["model"] = "model"
    path: Path
    eos_token: str | None = Field(default=None, min_length=1)


RecipeTokenizer = Annotated[
    ByteBpeTraining | WordPieceTraining | SentencePieceTraining | FileTokenizerConfig | ModelVocabulary,
    Field(discriminator="kind"),
]
Training = ByteBpeTraining | WordPieceTraining | SentencePieceTraining


class DataRecipe(StrictModel):
    """Sources, steps, tokenizer and output of one dataset.

    Attributes:
        steps: Rules and scans, in the order in which each document meets them. Left out: texts are brought into one
            Unicode form, and of equal ones the first is kept.
        quarantine: Decisions of a person on quarantined documents.
        tokenizer: Trained on the training split, a file, or that of a model.
    """

    sources: tuple[RecipeSource, ...] = Field(min_length=1, max_length=1000)
    steps: tuple[RecipeStep, ...] = Field(default=_default_steps(), max_length=1000)
    quarantine: QuarantineConfig = QuarantineConfig()
    tokenizer: RecipeTokenizer
    output: OutputConfig = OutputConfig()

    @property
    def source_names(self) -> tuple[str, ...]:
        """Of each source."""
        return tuple(source.name or _kind_label(source.kind) for source in self.sources)

    @property
    def step_names(self) -> tuple[str, ...]:
        """Of each step."""
        return tuple(step.label or step.kind for step in self.steps)

    def group_of(self, source: int) -> str:
        """Return the mixture group of a source, by its number."""
        return self.sources[source].group or self.source_names[source]

    @model_validator(mode="after")
    def _check_unique_names(self) -> Self:
        for key, word, names in (("sources", "name", self.source_names), ("steps", "label", self.step_names)):
            twice = sorted(name for name in set(names) if names.count(name) > 1)
            if twice:
                raise ValueError(f"{key}: two of them have the name {twice[0]!r}; give each another {word}")
        taken = sorted(set(self.step_names) & RESERVED)
        if taken:
            raise ValueError(f"steps: the label {taken[0]!r} is reserved for the account; choose another one")
        return self

    @model_validator(mode="after")
    def _check_names_field(self) -> Self:
        wanted = {step.names_field for step in self.steps if isinstance(step, PiiConfig)} - {None}
        for field in wanted:
            for number, source in enumerate(self.sources):
                if field not in getattr(source, "fields", (field,)):
                    # a document without the field would pass with all its names in it
                    raise ValueError(
                        f"sources.{number}.fields: lacks {field!r}, in which the step pii looks for names; add it"
                    )
        return self


RESERVED = frozenset({"kept", "damaged", "unsupported", "empty", "nfc", "read"})
"""What the account calls outcomes that no step decides."""


def load_recipe(path: Path, overrides: Iterable[str] = ()) -> DataRecipe:
    """Read a recipe; paths in it are taken from where the command runs, as in a run file.

    A section ``[canaries]`` is a further source of kind ``canaries``, with that name, in the group
    of the first source: few documents would fill no sequence of a group of their own.
    """
    recipe = load_config(path, DataRecipe, overrides, prepare=_prepare_sections)
    check_relative_paths(recipe.model_dump(mode="json"), path)
    return recipe


def _prepare_sections(data: dict[str, Any], home: Path) -> None:
    pin_own_code(data, home)
    section, sources = data.get("canaries"), data.get("sources")
    if isinstance(section, dict) and isinstance(sources, list) and sources and isinstance(sources[0], dict):
        first = sources[0]
        group = first.get("group") or first.get("name") or _kind_label(str(first.get("kind")))
        sources.append({"name": "canaries", "group": group, **data.pop("canaries"), "kind": "canaries"})


def _kind_label(kind: str) -> str:
    return "own" if is_own(kind) else kind
