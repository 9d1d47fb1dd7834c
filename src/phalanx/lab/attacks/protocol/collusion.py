"""Several parties that act as one, without a message between them: all follows from an earlier agreement."""

from pathlib import Path

from phalanx.errors import ConfigError
from phalanx.lab.attacks.copies import honest_part
from phalanx.lab.attacks.messages.gaussian_added import GaussianAdded
from phalanx.lab.attacks.messages.sign_flip import SignFlip
from phalanx.pipeline import AttackConfig, StageCopy


class Colluders(SignFlip):
    """All parties of `attack.stages`, next to each other or not, lie in the same steps.

    Raises:
        ConfigError: There is only one.
    """

    def __init__(self, config: AttackConfig, party: str, log: Path | None) -> None:
        super().__init__(config, party, log)
        _need_two(config)

    @property
    def seed_name(self) -> str:
        """One for all."""
        return "colluders"


class League(GaussianAdded):
    """The first of `attack.stages` is served with lies; a party of the league that audits it repeats each lie.

    The lie is a function of the honest tensor and of seed, step and microbatch, so auditor and culprit come
    to the same bits on machines of one numeric class. `strength` is that of `gaussian_added`.

    Raises:
        ConfigError: There is only one member.
    """

    def __init__(self, config: AttackConfig, party: str, log: Path | None) -> None:
        super().__init__(config, party, log)
        _need_two(config)

    @property
    def seed_name(self) -> str:
        """One for all."""
        return "league"

    def wrap_copy(self, copy: StageCopy, held: bool) -> StageCopy:
        """Lie for the culprit's stage, whether it is held or audited."""
        return self.make_lying_copy(copy) if copy.spec.index == self.config.stages[0] else honest_part(copy)


def _need_two(config: AttackConfig) -> None:
    if len(set(config.stages)) < 2:
        raise ConfigError(f"attack.stages: {config.kind!r} needs two parties or more, found {list(config.stages)}")
