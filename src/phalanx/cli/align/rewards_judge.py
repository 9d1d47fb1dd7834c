"""A judge of rewards: their process ends with the command."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.align.choice import Chooser


@contextmanager
def rewards_chooser(file: Path, out: Path) -> Iterator[tuple["Chooser", dict[str, Any]]]:
    """Open the rewards of a judge's file."""
    from phalanx.align import JudgeFile
    from phalanx.align.choice import by_worth
    from phalanx.align.judges import RewardsJudgeConfig
    from phalanx.align.prompts import AskedPrompt
    from phalanx.config import digest_config, load_config, pin_own_code
    from phalanx.errors import ConfigError
    from phalanx.rewards import RewardScorer, ScoredText

    judge_config: Any = load_config(file, JudgeFile, prepare=pin_own_code).judge
    if not isinstance(judge_config, RewardsJudgeConfig):
        raise ConfigError(f'{file}: a judge of kind = "{judge_config.kind}" needs principles; give --principles')
    with RewardScorer(
        judge_config.rewards_config, file.resolve().parent, out.with_name(f"{out.name}.rewards.log")
    ) as scorer:

        def worth(prompt: AskedPrompt, text: str) -> float:
            return scorer.total_reward(
                scorer.score_texts([ScoredText(prompt.where, prompt.readable_text, text, prompt.record)])[0]
            )

        yield by_worth(worth), {"judge": {"kind": judge_config.kind, "rewards": digest_config(judge_config)}}
