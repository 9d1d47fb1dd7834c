"""The rewards of sampled texts, from a child process with a time limit: a reward may hang or die, and is named then."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.child import AskedProcess
from phalanx.closing import Closeable
from phalanx.config import is_own
from phalanx.errors import RewardError
from phalanx.rewards.config import RewardsConfig

_TO_OPEN_S = 300.0
"""Seconds until the child must be ready: a reward model has to be loaded."""
_LARGEST = 1e6


@dataclass(frozen=True)
class ScoredText:
    """One sampled text that is to be rewarded.

    Attributes:
        where: The prompt and the number of the text, for messages.
        prompt: Prompt that the model was given.
        text: Text that the model wrote.
        record: The prompt's line of its file.
    """

    where: str
    prompt: str
    text: str
    record: Mapping[str, Any] = field(default_factory=dict)


class RewardScorer(Closeable):
    """A scorer of texts.

    Args:
        home: The directory of the run file, where functions of the user's own are.
        log: File for the child's output.
    """

    def __init__(self, config: RewardsConfig, home: Path, log: Path) -> None:
        self._config = config
        self._home = home
        self._log = log
        self._child: AskedProcess | None = None

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Names of the rewards in metrics: the name, or the kind, with a number where two have the same."""
        kinds = [
            reward.name or reward.kind.partition(":")[2].partition("@")[0] or reward.kind for reward in self._config.of
        ]
        return tuple(
            kind if kinds.count(kind) == 1 else f"{kind}_{number}" for number, kind in enumerate(kinds, start=1)
        )

    def score_texts(self, texts: Sequence[ScoredText]) -> list[tuple[float, ...]]:
        """Return every reward of each text, before weights.

        Raises:
            RewardError: A reward fails, takes too long, or is no finite number of at most a million; names the text.
        """
        return [tuple(self._score_text(number, text) for number in range(len(self._config.of))) for text in texts]

    def total_reward(self, rewards: Sequence[float]) -> float:
        """The weighted sum of a text's rewards."""
        return math.fsum(config.weight * reward for config, reward in zip(self._config.of, rewards, strict=True))

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def _score_text(self, number: int, text: ScoredText) -> float:
        asked = {"reward": number, "prompt": text.prompt, "text": text.text, "record": dict(text.record)}
        place = f"rewards.of[{number}] ({self.reward_names[number]}), {text.where}"
        value = self._ask_child(asked, place, self._config.timeout_s)
        if not isinstance(value, float) or not abs(value) <= _LARGEST:
            raise self._reward_error(
                place, f"found {value!r:.80}, expected a finite number of at most {_LARGEST:g} in size"
            )
        return value

    def _ask_child(self, asked: Mapping[str, Any], where: str, timeout_s: float) -> Any:
        child = self._start_child()
        try:
            message, _ = child.ask(asked, timeout_s=timeout_s)
        except TimeoutError as exc:
            raise self._reward_error(where, f"took longer than rewards.timeout_s = {timeout_s:g}") from exc
        except EOFError as exc:
            raise self._reward_error(where, f"its process ended: {exc}") from exc
        if "error" in message:
            raise self._reward_error(where, message["error"])
        return message["found"]

    def _start_child(self) -> AskedProcess:
        if self._child is None:
            self._child = AskedProcess(["phalanx.rewards.serve"], log=self._log)
            first = {"rewards": self._config.model_dump(mode="json"), "home": str(self._home)}
            self._ask_child(first, "rewards", _TO_OPEN_S)
        return self._child

    def _reward_error(self, where: str, why: str) -> RewardError:
        # a child that hangs is of no more use, and one that failed may be
        self.close()
        has_own_code = any(is_own(reward.kind) for reward in self._config.of)
        other = (
            "; with a function that was changed, begin a new run where this one is, with --from" if has_own_code else ""
        )
        return RewardError(f"{where}: {why}; mend the reward, then continue with --resume{other}: nothing is lost")
