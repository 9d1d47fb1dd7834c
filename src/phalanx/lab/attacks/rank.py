"""One rank of a party lies to the others, and the party as a whole signs the result."""

from phalanx.errors import ConfigError
from phalanx.lab.attacks.attack import Attack
from phalanx.lab.attacks.messages.message_attack import LyingRunner, MessageAttack
from phalanx.lab.attacks.states.gradient_attack import GradientAttack, PoisoningRunner
from phalanx.pipeline import StageRunner
from phalanx.stage_group import Share, WrapShare


def lying_rank(attack: Attack) -> WrapShare:
    """What makes a rank lie about its rows and positions, or about the weight gradients that it adds up.

    A rank knows no roles: it lies about what its party serves and about what its party recomputes for others.

    Args:
        attack: Attack on messages or on weight gradients, applied to this rank's piece.

    Raises:
        ConfigError: The attack is on something that rank 0 alone has.
    """
    if not isinstance(attack, MessageAttack | GradientAttack):
        raise ConfigError(
            f"attack.kind = {attack.config.kind!r} is on what rank 0 of a party has; take an attack on messages or on "
            "weight gradients, or leave the rank out"
        )

    def wrap(share: Share) -> Share:
        share.runner = _make_lying_runner(attack, share.runner)
        return share

    return wrap


def _make_lying_runner(attack: MessageAttack | GradientAttack, honest: StageRunner) -> StageRunner:
    return LyingRunner(honest, attack) if isinstance(attack, MessageAttack) else PoisoningRunner(honest, attack)
