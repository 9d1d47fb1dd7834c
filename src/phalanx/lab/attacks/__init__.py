"""Red team: code that changes a party's computations, state and messages from outside; production never imports it."""

from phalanx.lab.attacks.attack import Attack, attack_files_in
from phalanx.lab.attacks.messages.message_attack import HonestMessage, MessageAttack
from phalanx.lab.attacks.start import AttackPlan, attackers_of
from phalanx.lab.attacks.states.rehearsed_backdoor import Rehearsal, Secret, target_success
from phalanx.lab.attacks.table import ATTACKS, AttackEntry, make_actor, check_attack, load_attack, make_attack

__all__ = [
    "ATTACKS",
    "Attack",
    "AttackEntry",
    "AttackPlan",
    "HonestMessage",
    "MessageAttack",
    "Rehearsal",
    "Secret",
    "attack_files_in",
    "attackers_of",
    "check_attack",
    "load_attack",
    "make_actor",
    "make_attack",
    "target_success",
]
