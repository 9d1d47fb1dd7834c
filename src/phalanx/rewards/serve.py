"""The child process that computes rewards; whatever it does, its starter goes on."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.child import Message, answer_orders, die_with_parent
from phalanx.config import is_own, open_own_code
from phalanx.errors import PhalanxError
from phalanx.rewards.config import RewardsConfig
from phalanx.rewards.rules import Rule, open_reward

_MAX_CHARACTERS = 2000


def main() -> None:
    """Open the rewards that the first order names, then answer each further order until there is none."""
    die_with_parent()
    rules: list[Rule] = []

    def answer_order(order: dict[str, Any], _: bytes) -> Iterator[Message]:
        try:
            if "home" in order:
                rules.extend(_open_rules(order["rewards"], Path(order["home"])))
                yield {"found": True}, b""
            else:
                yield {"found": _compute_reward(rules[order["reward"]], order)}, b""
        except (PhalanxError, MemoryError, RecursionError) as exc:
            yield {"error": f"{exc or type(exc).__name__}"[:_MAX_CHARACTERS]}, b""

    answer_orders(answer_order)


def _open_rules(rewards: dict[str, Any], home: Path) -> Iterator[Rule]:
    config = RewardsConfig.model_validate_json(json.dumps(rewards))
    for reward in config.of:
        if is_own(reward.kind):
            open_own_code(reward.kind, home)
        yield open_reward(reward)


def _compute_reward(rule: Rule, order: dict[str, Any]) -> float:
    value = rule(order["prompt"], order["text"], order["record"])
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise PhalanxError(f"found {value!r:.80}, expected a finite number")


if __name__ == "__main__":
    main()
