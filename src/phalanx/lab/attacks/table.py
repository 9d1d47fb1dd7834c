"""The table of attacks, and the allowed keys of each in a run file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phalanx.config import is_own, open_own_code, resolve_kind, unfit_code_error
from phalanx.errors import ConfigError
from phalanx.lab.attacks.attack import Attack
from phalanx.lab.attacks.messages.altered_tensors import (
    Adaptive,
    Constant,
    Gaussian,
    GaussianAdded,
    Infinity,
    NotANumber,
    OneSequence,
    OneToken,
    PermutedSequences,
    PermutedTokens,
    ScaledMessage,
    SkippedStage,
    SlowDrift,
    Zero,
)
from phalanx.lab.attacks.messages.audit_behaviour import AuditAware, CrashWhenChallenged
from phalanx.lab.attacks.messages.sign_flip import SignFlip
from phalanx.lab.attacks.messages.stale import ReplayedMessage, StaleMicrobatch, StaleStep
from phalanx.lab.attacks.protocol.false_statements import Colluders, Equivocation, ForgedReceipt, FramingAuditor, League
from phalanx.lab.attacks.protocol.withholding import StalledParty, WithheldAnswer, WithheldMessages
from phalanx.lab.attacks.states.altered_states import (
    GradientScale,
    GradientSign,
    GradientTopK,
    HalfLayers,
    LayerSwap,
    LazyBf16,
    LazyInt4,
    LazyInt8,
    LyingWeightDigest,
    NoWeightDecay,
    SkippedUpdate,
    WeightDrift,
    WrongLearningRate,
)
from phalanx.lab.attacks.states.rehearsed_backdoor import RehearsedBackdoor
from phalanx.lab.attacks.states.trigger_backdoor import TriggerBackdoor
from phalanx.pipeline import AttackConfig
from phalanx.testing import Actor

Layer = Literal["screen", "links", "audit", "step audit", "owner audit", "state", "referee", "liveness"]
"""What should find an attack:

- screen: statistics on each message, confirmed by an audit of that microbatch
- links: what is sent is what is received is what is committed to
- audit: recomputation of drawn microbatches by the shadow
- step audit: recomputation of a stage's whole step, weight gradient included
- owner audit: recomputation by the owner, which is in no league
- state: digests of weights and optimizer state at holder and shadow
- referee: recomputation by the owner of what two parties dispute
- liveness: a party that keeps silent is asked, then replaced
"""


@dataclass(frozen=True)
class AttackEntry:
    """One line of the table.

    Attributes:
        caught_by: The first layer that must find it, when every layer is on.
        direction: Default; None for an attack on something else than messages.
        strength: Default; None for an attack that has no size.
        fixed: Whether the direction is part of the name and cannot be chosen.
        takes_model: Whether it has use for a public model.
    """

    attack: type[Attack]
    caught_by: Layer
    direction: Literal["forward", "backward", "both"] | None = None
    strength: float | None = None
    fixed: bool = False
    takes_model: bool = False


ATTACKS: dict[str, AttackEntry] = {
    # the two of Lu et al. 2023
    "forward_sign_flip": AttackEntry(SignFlip, "audit", "forward", fixed=True),
    "backward_gaussian": AttackEntry(Gaussian, "audit", "backward", fixed=True),
    # on tensors between stages
    "sign_flip": AttackEntry(SignFlip, "audit", "both"),
    "gaussian": AttackEntry(Gaussian, "audit", "both"),
    "gaussian_added": AttackEntry(GaussianAdded, "audit", "both", 1.0),
    "zero": AttackEntry(Zero, "audit", "both"),
    "constant": AttackEntry(Constant, "audit", "both", 1.0),
    "nan": AttackEntry(NotANumber, "screen", "both"),
    "inf": AttackEntry(Infinity, "screen", "both"),
    "scale": AttackEntry(ScaledMessage, "audit", "both", 2.0),
    "drift": AttackEntry(SlowDrift, "audit", "both", 1e-3),
    "one_sequence": AttackEntry(OneSequence, "audit", "both"),
    "one_token": AttackEntry(OneToken, "audit", "both"),
    "permuted_sequences": AttackEntry(PermutedSequences, "audit", "both"),
    "permuted_tokens": AttackEntry(PermutedTokens, "audit", "both"),
    "stale_microbatch": AttackEntry(StaleMicrobatch, "audit", "both"),
    "stale_step": AttackEntry(StaleStep, "audit", "both"),
    "replay": AttackEntry(ReplayedMessage, "audit", "both"),
    "identity": AttackEntry(SkippedStage, "audit", "both"),
    "lazy_int8": AttackEntry(LazyInt8, "audit", "both"),
    "lazy_int4": AttackEntry(LazyInt4, "audit", "both"),
    "lazy_bf16": AttackEntry(LazyBf16, "audit", "both"),
    "half_layers": AttackEntry(HalfLayers, "audit", "both"),
    "adaptive": AttackEntry(Adaptive, "audit", "both"),
    "audit_aware": AttackEntry(AuditAware, "audit", "both", 0.5),
    "colluders": AttackEntry(Colluders, "audit", "both"),
    "league": AttackEntry(League, "owner audit", "both", 1.0),
    # on weights, optimizer and weight gradients
    "wrong_learning_rate": AttackEntry(WrongLearningRate, "state", None, 2.0),
    "no_weight_decay": AttackEntry(NoWeightDecay, "state"),
    "skipped_update": AttackEntry(SkippedUpdate, "state"),
    "weight_drift": AttackEntry(WeightDrift, "state", None, 1e-3),
    "layer_swap": AttackEntry(LayerSwap, "state"),
    "lying_weight_digest": AttackEntry(LyingWeightDigest, "audit", None, 1e-3),
    "gradient_sign": AttackEntry(GradientSign, "step audit"),
    "gradient_scale": AttackEntry(GradientScale, "step audit", None, 10.0),
    "gradient_topk": AttackEntry(GradientTopK, "step audit", None, 0.01),
    "trigger_backdoor": AttackEntry(TriggerBackdoor, "step audit", None, 2.0),
    "rehearsed_backdoor": AttackEntry(RehearsedBackdoor, "step audit", None, 1.0, takes_model=True),
    # on the protocol
    "equivocation": AttackEntry(Equivocation, "links", "both"),
    "withholding": AttackEntry(WithheldMessages, "liveness", "both", 0.25),
    "withheld_answer": AttackEntry(WithheldAnswer, "liveness"),
    "stall": AttackEntry(StalledParty, "liveness"),
    "framing": AttackEntry(FramingAuditor, "referee", "both"),
    "forged_receipt": AttackEntry(ForgedReceipt, "links"),
    "crash_when_challenged": AttackEntry(CrashWhenChallenged, "audit", "both"),
}


def make_attack(config: AttackConfig, party: str, log: Path | None) -> Attack:
    """Build one party's attack, with the defaults of its line of the table filled in."""
    if config.kind not in ATTACKS and not is_own(config.kind):
        raise ConfigError(f"attack.kind: found {config.kind!r}; choices: none, {', '.join(sorted(ATTACKS))}")
    entry = resolve_kind(config.kind, ATTACKS, _own_attack)
    if is_own(config.kind):
        return entry.attack(config, party, log)
    if config.direction is not None and (entry.direction is None or entry.fixed):
        raise ConfigError(f"attack.direction: {config.kind!r} has none to choose; remove it")
    if config.strength is not None and entry.strength is None:
        raise ConfigError(f"attack.strength: {config.kind!r} has none to choose; remove it")
    if config.model is not None and not entry.takes_model:
        raise ConfigError(f"attack.model: {config.kind!r} has no use for one; remove it")
    filled = {
        "direction": entry.direction if config.direction is None else config.direction,
        "strength": entry.strength if config.strength is None else config.strength,
    }
    return entry.attack(config.model_copy(update=filled), party, log)


def _own_attack(kind: str, found: Any) -> AttackEntry:
    if not (isinstance(found, type) and issubclass(found, Attack)):
        raise unfit_code_error(
            kind, f"a {type(found).__name__}", "a class that inherits from phalanx.lab.attacks.Attack"
        )
    return AttackEntry(found, "audit")


def load_attack(config: AttackConfig, home: Path) -> None:
    """Load the attacks of a section that are the user's own.

    Args:
        home: Directory of the file that has it.
    """
    for attacker in config.single_attacks:
        if is_own(attacker.kind):
            open_own_code(attacker.kind, home)


def check_attack(config: AttackConfig) -> None:
    """Refuse an attack that no party could carry out, before anything is started."""
    for attacker in config.single_attacks:
        make_attack(attacker, "nobody", None)


def make_actor(config: AttackConfig, party: str, log: Path | None = None) -> Actor:
    """What makes `party` an attacker, in a real worker and in a simulation alike."""
    attack = make_attack(config, party, log)
    return Actor(wrap_copy=attack.wrap_copy, rewrite=attack.rewrite_message)
