"""Red team: what a party sends is rewritten from outside; production code never imports this package."""

from phalanx.attacks.attacker import AttackedRunner
from phalanx.attacks.backward_gaussian import BackwardGaussian
from phalanx.attacks.drill import ATTACKS, attack_wrapper, run_worker_with_attack
from phalanx.attacks.forward_sign_flip import ForwardSignFlip
from phalanx.attacks.schedule import attacks_in

__all__ = [
    "ATTACKS",
    "AttackedRunner",
    "BackwardGaussian",
    "ForwardSignFlip",
    "attack_wrapper",
    "attacks_in",
    "run_worker_with_attack",
]
