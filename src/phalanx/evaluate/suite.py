"""Suites: a TOML header beside a file of JSON lines, in this package or the user's own."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from phalanx.config import StrictModel, load_config
from phalanx.data.sources.files import read_lines, read_text
from phalanx.data.sources.jsonl import parse_object
from phalanx.data.tasks import TASKS
from phalanx.errors import ConfigError, DataError
from phalanx.evaluate.constraints import Constraint
from phalanx.evaluate.perturbations import PERTURBATIONS

FOLDER = Path(__file__).parent / "suites"
SAFETY_SET = FOLDER / "safety.jsonl"
"""Harmful requests without operational detail, and harmless ones that sound like them."""
MAX_ROWS = 100_000
_MAX_CHARACTERS = 200_000
Line = Annotated[str, Field(min_length=1, max_length=_MAX_CHARACTERS)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]


class SuiteRow(StrictModel):
    """What every row may have.

    Attributes:
        id: Name of the row, once in a suite; its number where left out.
        cluster: Rows of one cluster are no independent samples; the row by itself where left out.
    """

    id: str = Field(default="", max_length=200)
    cluster: str = Field(default="", max_length=200)


class TextRow(SuiteRow):
    """A text of which the likelihood is measured."""

    text: Line


class PairRow(SuiteRow):
    """Two sentences that differ in who is spoken of; `more` fits the stereotype."""

    group: str = Field(min_length=1, max_length=60)
    more: Line
    less: Line


class ChoiceRow(SuiteRow):
    """A question with its choices; `answer` is the number of the right one."""

    question: Line
    choices: tuple[Line, ...] = Field(min_length=2, max_length=26)
    answer: int = Field(ge=0, le=25)


class NeedleRow(ChoiceRow):
    """A sentence that is hidden in a long text; question and choices are about it."""

    fact: Line


class AskedRow(SuiteRow):
    """A prompt; `harmful` where it should be refused."""

    prompt: Line
    harmful: bool = False


class InstructionRow(SuiteRow):
    """A prompt with constraints on its answer."""

    prompt: Line
    constraints: tuple[Constraint, ...] = Field(min_length=1, max_length=20)


class ScoreSettings(StrictModel):
    """Nothing to set."""


class ChoiceSettings(StrictModel):
    """The prompt around a question; a choice follows it behind one space."""

    prompt: str = Field(default="Question: {question}\nAnswer:", pattern=r"\{question\}", max_length=4000)


class RobustSettings(StrictModel):
    """Disturbances of the questions of another suite.

    Attributes:
        strength: Share of letters that are touched.
    """

    base: Name
    strength: float = Field(default=0.1, gt=0.0, le=1.0)
    perturbations: tuple[str, ...] = PERTURBATIONS


class NeedleSettings(StrictModel):
    """The long text.

    Attributes:
        depths: Places of the sentence, from 0 at the beginning to 1 at the end.
    """

    filler: tuple[Line, ...] = Field(min_length=1, max_length=10_000)
    lengths: tuple[Annotated[int, Field(ge=100, le=10_000_000)], ...] = Field(min_length=1, max_length=16)
    depths: tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...] = Field(min_length=1, max_length=16)


class WritingSettings(StrictModel):
    """How texts are written; 0 takes the likeliest tokens."""

    max_new_tokens: int = Field(default=64, ge=1, le=1 << 14)
    temperature: float = Field(default=0.0, ge=0.0, le=10.0)


class ToxicitySettings(WritingSettings):
    """Words and phrases that count, by whole words without case, and continuations for each prompt."""

    words: tuple[Line, ...] = Field(min_length=1, max_length=10_000)
    continuations: int = Field(default=1, ge=1, le=100)


Kind = Literal["perplexity", "pairs", "choices", "robustness", "needle", "toxicity", "instructions", "refusal"]


@dataclass(frozen=True)
class KindForm:
    """The form of a kind's files; `writes` where the model must write texts rather than score them."""

    row: type[SuiteRow]
    settings: type[StrictModel]
    writes: bool = False


KINDS: Mapping[str, KindForm] = {
    "perplexity": KindForm(TextRow, ScoreSettings),
    "pairs": KindForm(PairRow, ScoreSettings),
    "choices": KindForm(ChoiceRow, ChoiceSettings),
    "robustness": KindForm(ChoiceRow, RobustSettings),
    "needle": KindForm(NeedleRow, NeedleSettings),
    "toxicity": KindForm(AskedRow, ToxicitySettings, writes=True),
    "instructions": KindForm(InstructionRow, WritingSettings, writes=True),
    "refusal": KindForm(AskedRow, WritingSettings, writes=True),
}


class SuiteHeader(StrictModel):
    """The TOML file of a suite.

    Attributes:
        version: Rises when rows change: figures of two versions are not compared.
        task: A table of labelled texts whose data the user has, in the place of a file of rows.
        limit: Maximum number of rows, drawn by their digests.
    """

    name: Name
    kind: Kind
    about: str = Field(min_length=1, max_length=500)
    licence: str = Field(min_length=1, max_length=100)
    version: int = Field(ge=1)
    task: str | None = None
    limit: int | None = Field(default=None, ge=1)
    settings: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """A suite that was read.

    Attributes:
        rows: Each with an id of its own, and a cluster.
        settings: An object of the kind's class.
        digest: SHA-256 in hex over header and rows' file.
        data_digest: Over the labelled texts of a task; None where the suite has a file of rows.
        prompt: The prompt around questions; where they are disturbed, that of the base suite.
    """

    name: str
    kind: str
    about: str
    version: int
    rows: tuple[Any, ...]
    settings: Any
    digest: str
    data_digest: str | None = None
    prompt: str = ""

    @property
    def writes(self) -> bool:
        """Whether the model must write texts."""
        return KINDS[self.kind].writes


def list_suites() -> dict[str, SuiteHeader]:
    """Return the headers of the suites of this package by name."""
    return {path.stem: load_config(path, SuiteHeader) for path in sorted(FOLDER.glob("*.toml"))}


def digest_header(name: str) -> str:
    """Return the digest of a suite of this package that has no rows of its own."""
    return hashlib.sha256((FOLDER / f"{name}.toml").read_bytes()).hexdigest()


def open_suite(name: str, data: Path | None = None, limit: int | None = None) -> Suite:
    """Open a suite of this package by name, or one of the user's by the path of its TOML file.

    Args:
        data: Folder of the files of labelled texts; None for the usual places.
        limit: Maximum number of rows, beside the limit of the header.

    Raises:
        ConfigError: There is no such suite, or its header is wrong.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not name.endswith(".toml") and name not in {file.stem for file in FOLDER.glob("*.toml")}:
        choices = ", ".join(list_suites())
        raise ConfigError(f"--suite {name!r:.80}: there is no such suite; choices: {choices}, or a file NAME.toml")
    header = load_config(path, SuiteHeader)
    form = KINDS[header.kind]
    try:
        settings = form.settings.model_validate(header.settings, strict=False)
    except ValidationError as exc:
        first = exc.errors()[0]
        key = ".".join(["settings", *map(str, first["loc"])])
        raise ConfigError(f"{path}: {key}: {first['msg']}, got {first['input']!r:.60}") from exc
    digest = hashlib.sha256(path.read_bytes())
    if isinstance(settings, RobustSettings):
        return _disturbed_suite(header, settings, digest, data, limit)
    if header.task is not None:
        rows, data_digest = _read_task(header.task, data, path)
    else:
        rows, data_digest = _read_rows(path.with_suffix(".jsonl"), form.row, digest), None
    chosen = draw_rows(rows, min(filter(None, (header.limit, limit)), default=None))
    parts = (header.name, header.kind, header.about, header.version, chosen, settings, digest.hexdigest())
    return Suite(*parts, data_digest, getattr(settings, "prompt", ""))


def text_suite(name: str, path: Path, limit: int | None = None) -> Suite:
    """Return the suite of one's own text: a file of JSON lines with ``text``, or one document in a text file."""
    digest = hashlib.sha256(b"text")
    if path.suffix == ".jsonl" or path.name.endswith(".jsonl.gz"):
        rows = _read_rows(path, TextRow, digest)
    else:
        text = read_text(path)
        digest.update(text.encode())
        parts = [part for part in re.split(r"\r?\n\r?\n", text) if part.strip()]
        longest = max(map(len, parts), default=0)
        if longest > _MAX_CHARACTERS:
            message = f"has a paragraph of {longest} characters, at most {_MAX_CHARACTERS} are read"
            raise DataError(f"{path}: {message}; divide it by blank lines")
        rows = tuple(TextRow(id=str(number), text=part) for number, part in enumerate(parts))
    if not rows:
        raise DataError(f"{path}: has no text; give words")
    rows = tuple(row.model_copy(update={"cluster": row.cluster or row.id}) for row in rows)
    about = "Perplexity and bits per byte on the user's text, paragraph by paragraph."
    return Suite(name, "perplexity", about, 1, draw_rows(rows, limit), ScoreSettings(), digest.hexdigest())


def draw_rows(rows: Sequence[Any], limit: int | None) -> tuple[Any, ...]:
    """Return at most so many rows, in their order: those with the smallest digests of their ids."""
    if limit is None or len(rows) <= limit:
        return tuple(rows)
    order = sorted(range(len(rows)), key=lambda number: hashlib.sha256(rows[number].id.encode()).digest())
    return tuple(rows[number] for number in sorted(order[:limit]))


def _disturbed_suite(
    header: SuiteHeader, settings: RobustSettings, digest: Any, data: Path | None, limit: int | None
) -> Suite:
    unknown = sorted(set(settings.perturbations) - set(PERTURBATIONS))
    if unknown:
        raise ConfigError(f"settings.perturbations: no {unknown[0]!r:.40}; choices: {', '.join(PERTURBATIONS)}")
    base = open_suite(settings.base, data, limit)
    if base.kind != "choices":
        raise ConfigError(f"settings.base: {settings.base} has {base.kind}; give a suite of choices")
    digest.update(base.digest.encode())
    parts = (header.name, header.kind, header.about, header.version, base.rows, settings, digest.hexdigest())
    return Suite(*parts, base.data_digest, base.prompt)


def _read_rows(path: Path, form: type[SuiteRow], digest: Any) -> tuple[Any, ...]:
    reader, rows = TypeAdapter(form), []
    for number, content in enumerate(read_lines(path), start=1):
        digest.update(content)
        if not content.strip():
            continue
        place = f"{path}, line {number}"
        if number > MAX_ROWS:
            raise DataError(f"{path}: has more than {MAX_ROWS} rows; divide it")
        record = parse_object(content.rstrip(b"\r\n"), place)
        try:
            row = reader.validate_python(record, strict=False)
        except ValidationError as exc:
            first = exc.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise DataError(f"{place}: {key}: {first['msg']}, got {first['input']!r:.60}") from exc
        if isinstance(row, ChoiceRow) and row.answer >= len(row.choices):
            raise DataError(f"{place}: answer {row.answer} of {len(row.choices)} choices; the first one is 0")
        identity = row.id or str(number - 1)
        rows.append(row.model_copy(update={"id": identity, "cluster": row.cluster or identity}))
    ids = [row.id for row in rows]
    if not rows or len(set(ids)) < len(ids):
        twice = next((name for name in ids if ids.count(name) > 1), None)
        raise DataError(f"{path}: {'has no row' if twice is None else f'id {twice!r:.60} stands twice'}")
    return tuple(rows)


def _read_task(task: str, data: Path | None, path: Path) -> tuple[tuple[ChoiceRow, ...], str]:
    if task not in TASKS:
        raise ConfigError(f"{path}: task {task!r:.60} is none of {', '.join(TASKS)}")
    texts = TASKS[task].load(data)
    rows = []
    for number, example in enumerate(texts.examples):
        row = ChoiceRow(
            id=str(number), cluster=str(number), question=example.text, choices=texts.classes, answer=example.label
        )
        rows.append(row)
    return tuple(rows), texts.examples_digest
