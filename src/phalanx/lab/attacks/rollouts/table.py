"""The table of attacks on rollouts."""

from dataclasses import dataclass

from phalanx.errors import ConfigError
from phalanx.lab.attacks.rollouts.liar import LyingWriter
from phalanx.lab.attacks.rollouts.rule import ChangedTopP, WrongTemperature
from phalanx.lab.attacks.rollouts.texts import (
    BestOfSeveral,
    CopiedText,
    InventedReward,
    ReplayedText,
    TruncatedText,
    TwoAnswers,
    WrongPrompt,
)
from phalanx.lab.attacks.rollouts.weights import Int8Weights, OtherModel, StalePolicy
from phalanx.rollouts.verdict import DismissalCause, RolloutOffence


@dataclass(frozen=True)
class RolloutAttackEntry:
    """One line of the table.

    Attributes:
        liar: Writes instead of an honest worker.
        careless: Offence or dismissal of a careless liar.
        careful: Offence or dismissal of a liar with honest commitments; its tokens give it away.
    """

    liar: type[LyingWriter]
    careless: RolloutOffence | DismissalCause
    careful: RolloutOffence | DismissalCause


ROLLOUT_ATTACKS: dict[str, RolloutAttackEntry] = {
    "other_model": RolloutAttackEntry(OtherModel, "sketch", "draw"),
    "int8_weights": RolloutAttackEntry(Int8Weights, "sketch", "draw"),
    "stale_policy": RolloutAttackEntry(StalePolicy, "sketch", "draw"),
    "wrong_temperature": RolloutAttackEntry(WrongTemperature, "logprob", "draw"),
    "changed_top_p": RolloutAttackEntry(ChangedTopP, "draw", "draw"),
    "truncated_text": RolloutAttackEntry(TruncatedText, "logprob", "draw"),
    "best_of_several": RolloutAttackEntry(BestOfSeveral, "draw", "draw"),
    "copied_text": RolloutAttackEntry(CopiedText, "draw", "draw"),
    "wrong_prompt": RolloutAttackEntry(WrongPrompt, "sketch", "draw"),
    "replayed_text": RolloutAttackEntry(ReplayedText, "draw", "draw"),
    "invented_reward": RolloutAttackEntry(InventedReward, "reward", "reward"),
    "two_answers": RolloutAttackEntry(TwoAnswers, "equivocation", "equivocation"),
}


def make_liar(kind: str, *, careful: bool = True) -> LyingWriter:
    """Build a worker that lies.

    Raises:
        ConfigError: There is no such attack.
    """
    if kind not in ROLLOUT_ATTACKS:
        raise ConfigError(f"attack: found {kind!r}; choices: {', '.join(sorted(ROLLOUT_ATTACKS))}")
    return ROLLOUT_ATTACKS[kind].liar(careful=careful)
