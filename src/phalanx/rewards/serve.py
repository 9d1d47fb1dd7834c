"""The child process that computes rewards: one line of JSON in, one out; whatever it does, its starter goes on."""

import functools
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from phalanx.child import die_with_parent
from phalanx.config import is_own, open_own_code
from phalanx.errors import PhalanxError
from phalanx.rewards.config import RewardsConfig
from phalanx.rewards.rules import Rule, open_reward

_MOST_CHARACTERS = 2000


def main() -> None:
    """Open the rewards that the first line names, then answer each further line until there is none."""
    die_with_parent()
    # what the user's code prints is no answer
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    first = json.loads(sys.stdin.readline())
    rules: list[Rule] = []

    def opened() -> bool:
        config = RewardsConfig.model_validate_json(json.dumps(first["rewards"]))
        for reward in config.of:
            if is_own(reward.kind):
                open_own_code(reward.kind, Path(first["home"]))
            rules.append(open_reward(reward))
        return True

    _write_answer(answers, opened)
    for request in sys.stdin:
        asked = json.loads(request)
        _write_answer(answers, functools.partial(_compute_reward, rules, asked))


def _compute_reward(rules: Sequence[Rule], asked: Mapping[str, Any]) -> float:
    value = rules[asked["reward"]](asked["prompt"], asked["text"], asked["record"])
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise PhalanxError(f"found {value!r:.80}, expected a finite number")


def _write_answer(answers: IO[str], act: Callable[[], float | bool]) -> None:
    try:
        message: dict[str, Any] = {"found": act()}
    except (PhalanxError, MemoryError, RecursionError) as exc:
        message = {"error": f"{exc or type(exc).__name__}"[:_MOST_CHARACTERS]}
    print(json.dumps(message), file=answers, flush=True)


if __name__ == "__main__":
    main()
