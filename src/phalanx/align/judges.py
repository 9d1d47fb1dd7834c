"""Judges of answers: a model by the log-probability of a letter, a server that says one, or rewards."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from phalanx.align.writer import Writer, user_message
from phalanx.config import StrictModel
from phalanx.errors import RewardError
from phalanx.rewards import RewardsConfig
from phalanx.rewards.server import ServedModel, ServerSettings

_LETTERS = ("A", "B")


class Judge(Protocol):
    """Something that decides between two answers to a question, called A and B."""

    @property
    def judge_lineage(self) -> dict[str, Any]:
        """Return everything that decides the judge's answers."""

    def first_probability(self, question: str, /) -> float:
        """Return how sure it is of A, from 0 to 1."""


class ModelJudge:
    """A model in this process."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    @property
    def judge_lineage(self) -> dict[str, Any]:
        """The model."""
        return {"kind": "model", "model": self._writer.writer_digest}

    def first_probability(self, question: str) -> float:
        """Return the probability of A, of A and B, as the first thing that it says."""
        first, second = self._writer.log_probs([user_message(question)], _LETTERS)
        # a difference beyond this is certain, and exp would overflow
        return 1.0 / (1.0 + math.exp(min(second - first, 700.0)))


class ServerJudgeConfig(ServerSettings):
    """A language model behind an OpenAI-compatible server.

    Attributes:
        timeout_s: Time limit of one answer.
    """

    kind: Literal["server"] = "server"
    timeout_s: float = Field(default=60.0, gt=0.0, le=3600.0, allow_inf_nan=False)


class ServerJudge:
    """A language model that a server runs."""

    def __init__(self, config: ServerJudgeConfig) -> None:
        self._config, self._served = config, ServedModel(config, config.timeout_s)

    @property
    def judge_lineage(self) -> dict[str, Any]:
        """Server and model."""
        return {"kind": "server", "url": self._config.url, "model": self._config.model}

    def first_probability(self, question: str) -> float:
        """Return 1 where it says A, 0 where it says B."""
        try:
            letter = self._served.ask_question(question).strip().strip("()*.\"'").upper()
        except RewardError as exc:
            raise _refusal_error(str(exc)) from exc
        if letter not in _LETTERS:
            raise _refusal_error(f"{self._config.url}: the judge said {letter!r:.60}, expected A or B and nothing else")
        return float(letter == _LETTERS[0])


def _refusal_error(why: str) -> RewardError:
    do = "repair the judge, then repeat the command: finished rows are reused"
    return RewardError(f"{why}; {do}").with_facts(code="PHX-R042", do=do)


class ModelJudgeConfig(StrictModel):
    """A judge model other than the answering model.

    Attributes:
        path: A run, a checkpoint in one, or a directory in the hub's layout.
    """

    kind: Literal["model"] = "model"
    path: Path


class RewardsJudgeConfig(RewardsConfig):
    """Rewards, as in ``[rewards]`` of a run file: the answer that is worth more in their weighted sum is better."""

    kind: Literal["rewards"] = "rewards"

    @property
    def rewards_config(self) -> RewardsConfig:
        """The same as a run file has them."""
        return RewardsConfig(of=self.of, timeout_s=self.timeout_s)


class JudgeFile(StrictModel):
    """A file that names a judge, in its section ``[judge]``."""

    judge: Annotated[ServerJudgeConfig | ModelJudgeConfig | RewardsJudgeConfig, Field(discriminator="kind")]
