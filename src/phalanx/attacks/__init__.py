"""Red team: what a party computes, keeps or sends is changed from outside; production never imports this package."""

from phalanx.attacks.attack import Attack
from phalanx.attacks.drill import run_worker_with_attack
from phalanx.attacks.message_attack import MessageAttack, Work
from phalanx.attacks.rehearsed_backdoor import Rehearsal, Secret, TargetSuccess, target_success
from phalanx.attacks.schedule import attacks_in
from phalanx.attacks.table import ATTACKS, AttackLine, Layer, actor, check_attack, make_attack
from phalanx.attacks.trigger_backdoor import TriggerSuccess, trigger_success

__all__ = [
    "ATTACKS",
    "Attack",
    "AttackLine",
    "Layer",
    "MessageAttack",
    "Rehearsal",
    "Secret",
    "TargetSuccess",
    "TriggerSuccess",
    "Work",
    "actor",
    "attacks_in",
    "check_attack",
    "make_attack",
    "run_worker_with_attack",
    "target_success",
    "trigger_success",
]
