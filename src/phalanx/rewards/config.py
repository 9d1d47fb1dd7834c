"""The section ``[rewards]`` of a run file: what sampled texts are worth."""

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from phalanx.config import StrictModel, any_kind
from phalanx.config.strict import check_reference, later_key
from phalanx.rewards.server import ServerSettings


class RewardSettings(StrictModel):
    """The keys that every reward has.

    Attributes:
        kind: Its name, or a reference to a function of the user's own.
        weight: Weight of the reward in the sum of all.
        name: Name in metrics, such as the value that it stands for; None for its kind.
    """

    kind: str
    weight: float = Field(default=1.0, ge=-1e3, le=1e3, allow_inf_nan=False)
    name: str | None = later_key(None, pattern=r"^[a-z][a-z0-9_]{0,39}$")


class ExactReward(RewardSettings):
    """1 where the text equals the expected answer in the prompt's record, white space around both left out; else 0."""

    kind: Literal["exact"] = "exact"
    field: str = Field(default="answer", min_length=1)
    """The field of the record that has the right answer."""


class PlacesReward(RewardSettings):
    """The share of the right answer's characters that stand at their place in the text."""

    kind: Literal["places"] = "places"
    field: str = Field(default="answer", min_length=1)
    """The field of the record that has the right answer."""


class PatternReward(RewardSettings):
    """1 where the text has a match of a regular expression; else 0."""

    kind: Literal["pattern"] = "pattern"
    pattern: str = Field(min_length=1, max_length=1000)

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as exc:
            raise ValueError(f"is no regular expression: {exc}") from exc
        return value


class ModelReward(RewardSettings):
    """Score of prompt and text by a reward model."""

    kind: Literal["model"] = "model"
    path: Path
    """A directory in the hub's layout, of a model that classifies sequences into one class."""


class JudgeReward(ServerSettings, RewardSettings):
    """The number that a language model behind an OpenAI-compatible server answers with."""

    kind: Literal["judge"] = "judge"
    question: str | None = Field(default=None, min_length=1, max_length=20_000)
    """Question to the judge, with ``{prompt}`` and ``{text}``; by default how good the answer is, from 0 to 10."""

    @field_validator("question")
    @classmethod
    def _check_question(cls, value: str | None) -> str | None:
        if value is not None and "{text}" not in value:
            raise ValueError("does not show the judge the answer; write {text} where it belongs")
        return value


class OwnReward(RewardSettings):
    """Result of a function of the user's own, ``(prompt, text, record)``."""

    @field_validator("kind")
    @classmethod
    def _check_reference(cls, value: str) -> str:
        return check_reference(value)


REWARDS: dict[str, type[RewardSettings]] = {
    "exact": ExactReward,
    "places": PlacesReward,
    "pattern": PatternReward,
    "model": ModelReward,
    "judge": JudgeReward,
}


RewardConfig: Any = any_kind(REWARDS, OwnReward)
"""Config of one reward, told apart by ``kind``."""


class RewardsConfig(StrictModel):
    """The section ``[rewards]``.

    Attributes:
        of: The rewards, which are added up.
        timeout_s: Time limit of one reward for one text.
    """

    of: tuple[RewardConfig, ...] = Field(min_length=1, max_length=32)
    timeout_s: float = Field(default=30.0, gt=0.0, le=3600.0, allow_inf_nan=False)
