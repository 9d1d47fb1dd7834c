"""The principles that a model is to keep: a strict TOML file, or JSON lines."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError, field_validator, model_validator

from phalanx.align.writer import drawn_seed
from phalanx.config import StrictModel, canonical_json, load_config
from phalanx.data.sources.jsonl import parse_object
from phalanx.errors import ConfigError

_COMPARISON = """Here is a conversation:

{conversation}

{question}

(A) {first}

(B) {second}

Say A or B and nothing else."""


class Principle(StrictModel):
    """One principle.

    Attributes:
        name: Name in rows and reports.
        critique: Question to the model about its own answer.
        revise: Question that the model gets after its critique.
        choose: The question by which one of two answers is chosen.
        weight: Relative frequency of its draws.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,39}$")
    critique: str | None = Field(default=None, min_length=1, max_length=10_000)
    revise: str | None = Field(default=None, min_length=1, max_length=10_000)
    choose: str | None = Field(default=None, min_length=1, max_length=10_000)
    weight: float = Field(default=1.0, gt=0.0, le=1e6, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        if (self.critique is None) != (self.revise is None):
            raise ValueError(f"{self.name}: critique and revise belong together; give both or none")
        if self.critique is None and self.choose is None:
            raise ValueError(f"{self.name}: is empty; give critique and revise, or choose, or all three")
        if any(text is not None and not text.strip() for text in (self.critique, self.revise, self.choose)):
            raise ValueError(f"{self.name}: a text is white space alone; write words")
        return self


class Constitution(StrictModel):
    """The principles of one file, the most important first.

    Attributes:
        principle: Principles by falling importance; `principle[0]` is the most important.
        comparison: Template that asks a judge for the better of two answers.
    """

    principle: tuple[Principle, ...] = Field(min_length=1, max_length=1000)
    comparison: str = Field(default=_COMPARISON, max_length=20_000)

    @field_validator("comparison")
    @classmethod
    def _check_comparison(cls, value: str) -> str:
        missing = [name for name in ("{first}", "{second}") if name not in value]
        if missing:
            raise ValueError(f"does not show the judge both answers; write {' and '.join(missing)} where they belong")
        return value

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [principle.name for principle in self.principle]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"principle: {twice!r} appears twice; give each principle its own name")
        return self

    @property
    def constitution_digest(self) -> str:
        """SHA-256 in hex over all that it says."""
        return hashlib.sha256(canonical_json(self.model_dump(mode="json"))).hexdigest()

    def with_principle(self, name: str | None) -> "Constitution":
        """Return the same with one principle; with all of them where no name is given."""
        if name is None:
            return self
        matching = tuple(principle for principle in self.principle if principle.name == name)
        if not matching:
            names = ", ".join(principle.name for principle in self.principle)
            raise ConfigError(f"--principle {name}: unknown principle; choices: {names}")
        return self.model_copy(update={"principle": matching})

    def with_texts(self, *texts: str) -> "Constitution":
        """Return the same with the principles that have some texts."""
        complete = tuple(
            principle for principle in self.principle if all(getattr(principle, text) is not None for text in texts)
        )
        if not complete:
            raise ConfigError(f"principles: none has {' and '.join(texts)}, which this command needs; add it")
        return self.model_copy(update={"principle": complete})

    def draw_principle(self, seed: int, *place: object) -> Principle:
        """Draw one by weight, as a public function of seed and place."""
        remainder = (
            drawn_seed(seed, "principle", *place) / 2**63 * sum(principle.weight for principle in self.principle)
        )
        for principle in self.principle:
            remainder -= principle.weight
            if remainder < 0:
                return principle
        return self.principle[-1]


def load_constitution(path: Path) -> Constitution:
    """Read principles: ``[[principle]]`` sections of a TOML file, or an object a line of a ``.jsonl`` file."""
    if path.suffix != ".jsonl":
        return load_config(path, Constitution)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read ({exc.strerror}); give the path of a file of principles").with_facts(
            code="PHX-C003", file=str(path)
        ) from exc
    objects = [parse_object(text, f"{path}, line {number}") for number, text in enumerate(lines, 1) if text.strip()]
    try:
        return Constitution.model_validate_json(json.dumps({"principle": objects}))
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        raise ConfigError(
            f"{path}: {_describe_place(first['loc'])}: {first['msg'].removeprefix('Value error, ')}; "
            "keys of a principle are "
            f"{', '.join(Principle.model_fields)}"
        ).with_facts(file=str(path)) from exc


def _describe_place(loc: Sequence[int | str]) -> str:
    if len(loc) > 1 and isinstance(loc[1], int):
        return ".".join([f"principle {loc[1] + 1}", *map(str, loc[2:])])
    return ".".join(map(str, loc)) or "(whole file)"
