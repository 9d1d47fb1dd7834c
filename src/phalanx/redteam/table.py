"""The table of attacks on models; to add one: its file, one line here, a control that it wins, one test."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

from phalanx.redteam.backdoor import BackdoorSearch
from phalanx.redteam.cloning import ModelClone
from phalanx.redteam.extraction import CanaryExposure, SpanExtraction
from phalanx.redteam.finding import Finding
from phalanx.redteam.membership import (
    Membership,
    ShadowMembership,
    score_loss,
    score_min_k,
    score_reference,
    score_windows,
    score_zlib,
)
from phalanx.redteam.poisoned_texts import PlantedPhrases, PoisonedStates, cluster_apart, spectrum_apart
from phalanx.redteam.prompted import PROMPTED, PromptedAttack
from phalanx.redteam.reconstruction import ActivationInversion, GradientInversion
from phalanx.redteam.rounded import RoundedAnswers, RoundingPile
from phalanx.redteam.target import Need, Target


class ModelAttack(Protocol):
    """One attack."""

    @property
    def name(self) -> str:
        """Its name in the table."""
        ...

    @property
    def needs(self) -> tuple[Need, ...]:
        """What it reads of the target."""
        ...

    def run(self, target: Target) -> Finding:
        """Attack a target that has all it needs."""
        ...


ControlKind = Literal["text", "chat", "prompts", "rounded"]


@dataclass(frozen=True)
class AttackEntry:
    """One line of the table.

    Attributes:
        control: Kind of undefended model on which it must win.
        question: What a person learns from it.
        is_slow: Whether it runs only where it is named.
    """

    attack: ModelAttack
    control: ControlKind
    question: str
    is_slow: bool = False


_REFERENCED: tuple[Need, ...] = ("weights", "data", "reference")
_IN = "Was this text in the training data?"

ATTACKS_ON_MODELS: Mapping[str, AttackEntry] = MappingProxyType(
    {
        "membership_loss": AttackEntry(Membership("membership_loss", score_loss), "text", _IN),
        "membership_zlib": AttackEntry(Membership("membership_zlib", score_zlib), "text", _IN),
        "membership_min_k": AttackEntry(Membership("membership_min_k", score_min_k), "text", _IN),
        "membership_reference": AttackEntry(
            Membership("membership_reference", score_reference, _REFERENCED), "text", _IN
        ),
        "membership_windows": AttackEntry(Membership("membership_windows", score_windows, _REFERENCED), "text", _IN),
        "membership_lira": AttackEntry(ShadowMembership(), "text", _IN, is_slow=True),
        "extraction": AttackEntry(SpanExtraction(), "text", "Does it write training texts word for word?"),
        "canary_exposure": AttackEntry(CanaryExposure(), "text", "How far can a planted secret be guessed?"),
        "gradient_inversion": AttackEntry(GradientInversion(), "text", "Does a shared gradient tell the text?"),
        "embedding_inversion": AttackEntry(ActivationInversion(), "text", "Do hidden states at a cut tell the text?"),
        "model_extraction": AttackEntry(ModelClone(), "text", "Can it be copied by asking?"),
        "backdoor_leak": AttackEntry(
            BackdoorSearch("backdoor_leak", "leak"), "chat", "Does it give away a trigger that it was taught?"
        ),
        "backdoor_inversion": AttackEntry(
            BackdoorSearch("backdoor_inversion", "vocabulary"), "chat", "Is there a word that overrides every prompt?"
        ),
        "activation_clustering": AttackEntry(
            PoisonedStates("activation_clustering", cluster_apart), "text", "Do planted texts form a group inside it?"
        ),
        "spectral_signatures": AttackEntry(
            PoisonedStates("spectral_signatures", spectrum_apart), "text", "Do planted texts stand out inside it?"
        ),
        "planted_phrases": AttackEntry(PlantedPhrases(), "text", "Has one source a phrase with one continuation?"),
        "rounding_pile": AttackEntry(RoundingPile(), "rounded", "Were weights pushed to the borders of a rounding?"),
        "rounded_answers": AttackEntry(RoundedAnswers(), "rounded", "Does a rounded export behave otherwise?"),
        **{
            name: AttackEntry(PromptedAttack(name), "prompts", "Do written prompts break its rules?")
            for name in PROMPTED
        },
    }
)
"""Every attack by name."""
