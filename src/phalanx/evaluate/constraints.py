"""Constraints on an answer that a program can check."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from phalanx.config import StrictModel
from phalanx.evaluate.answers import cut_answer, list_words, parse_choice, parse_json_object, parse_number

Text = Annotated[str, Field(min_length=1, max_length=200)]
Texts = Annotated[tuple[Text, ...], Field(min_length=1, max_length=50)]
Count = Annotated[int, Field(ge=0, le=10_000)]


class SizeConstraint(StrictModel):
    """So many words, sentences, lines or bullets, at least and at most."""

    kind: Literal["words", "sentences", "lines", "bullets"]
    min: Count = 0
    max: Count = 10_000

    def is_met(self, answer: str) -> bool:
        """Whether an answer has so many."""
        lines = [row.strip() for row in answer.splitlines() if row.strip()]
        counts = {
            "words": lambda: len(list_words(answer)),
            "sentences": lambda: len([part for part in re.split(r"[.!?]+(?:\s|$)", answer) if part.strip()]),
            "lines": lambda: len(lines),
            "bullets": lambda: sum(row.startswith(("- ", "* ", "\u2022 ")) for row in lines),
        }
        return self.min <= counts[self.kind]() <= self.max


class WordConstraint(StrictModel):
    """Words that an answer has all of, or none of."""

    kind: Literal["includes", "excludes"]
    words: Texts

    def is_met(self, answer: str) -> bool:
        """Whether an answer has them; a phrase is found as whole words."""
        spaced = f" {' '.join(list_words(answer))} "
        matches = [f" {' '.join(list_words(word))} " in spaced for word in self.words]
        return all(matches) if self.kind == "includes" else not any(matches)


class EdgeConstraint(StrictModel):
    """The beginning or the end of an answer."""

    kind: Literal["begins", "ends"]
    text: Text

    def is_met(self, answer: str) -> bool:
        """Whether it is there, white space apart."""
        stripped = answer.strip()
        return stripped.startswith(self.text) if self.kind == "begins" else stripped.endswith(self.text)


class CaseConstraint(StrictModel):
    """Only lower case, or only upper case; an answer without letters is neither."""

    kind: Literal["lower_case", "upper_case"]

    def is_met(self, answer: str) -> bool:
        """Whether every letter is."""
        return answer.islower() if self.kind == "lower_case" else answer.isupper()


class JsonConstraint(StrictModel):
    """The answer is one JSON object with such keys and nothing around it."""

    kind: Literal["json"]
    keys: Texts

    def is_met(self, answer: str) -> bool:
        """Whether it is."""
        content = parse_json_object(answer)
        return content is not None and set(content) == set(self.keys)


class NumberConstraint(StrictModel):
    """The last number of the answer."""

    kind: Literal["number"]
    value: str = Field(pattern=r"^-?\d{1,15}(\.\d{1,9})?$")

    def is_met(self, answer: str) -> bool:
        """Whether it is this one, exactly."""
        return parse_number(answer) == parse_number(self.value)


class ChoiceConstraint(StrictModel):
    """The letter that the answer states."""

    kind: Literal["choice"]
    letter: str = Field(pattern="^[A-H]$")

    def is_met(self, answer: str) -> bool:
        """Whether it is this one."""
        return parse_choice(answer, 8) == ord(self.letter) - ord("A")


Constraint = Annotated[
    SizeConstraint
    | WordConstraint
    | EdgeConstraint
    | CaseConstraint
    | JsonConstraint
    | NumberConstraint
    | ChoiceConstraint,
    Field(discriminator="kind"),
]


def check_constraint(constraint: Any, answer: str) -> bool:
    """Whether an answer meets a constraint; an empty one meets none, however little was asked for."""
    read = cut_answer(answer)
    return bool(read.strip()) and bool(constraint.is_met(read))
