"""The table of attacks on models; to add one: its file, one line here, a control that it wins, one test."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

from phalanx.redteam.backdoor import BackdoorSearch
from phalanx.redteam.cloning import ModelClone
from phalanx.redteam.extraction import CanaryExposure, SpanExtraction
from phalanx.redteam.finding import AttackFinding
from phalanx.redteam.inference import AttributeInference, PropertyInference
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

    def run(self, target: Target) -> AttackFinding:
        """Attack a target that has all it needs."""
        ...


ControlKind = Literal["text", "skewed", "chat", "prompts", "rounded"]


@dataclass(frozen=True)
class ModelAttackEntry:
    """One line of the table.

    Attributes:
        control: Kind of undefended model on which it must win.
        is_slow: Whether it runs only where it is named.
    """

    attack: ModelAttack
    control: ControlKind
    question: str
    is_slow: bool = False


_REFERENCED: tuple[Need, ...] = ("weights", "data", "reference")
_IN = "Was this text in the training data?"

ATTACKS_ON_MODELS: Mapping[str, ModelAttackEntry] = MappingProxyType(
    {
        "membership_loss": ModelAttackEntry(Membership("membership_loss", score_loss), "text", _IN),
        "membership_zlib": ModelAttackEntry(Membership("membership_zlib", score_zlib), "text", _IN),
        "membership_min_k": ModelAttackEntry(Membership("membership_min_k", score_min_k), "text", _IN),
        "membership_reference": ModelAttackEntry(
            Membership("membership_reference", score_reference, _REFERENCED), "text", _IN
        ),
        "membership_windows": ModelAttackEntry(
            Membership("membership_windows", score_windows, _REFERENCED), "text", _IN
        ),
        "membership_lira": ModelAttackEntry(ShadowMembership(), "text", _IN, is_slow=True),
        "attribute_inference": ModelAttackEntry(
            AttributeInference(), "text", "Does it complete a training record by a missing value?"
        ),
        "property_inference": ModelAttackEntry(
            PropertyInference(), "skewed", "What is common in the training data as a whole?"
        ),
        "extraction": ModelAttackEntry(SpanExtraction(), "text", "Does it write training texts word for word?"),
        "canary_exposure": ModelAttackEntry(CanaryExposure(), "text", "How far can a planted secret be guessed?"),
        "gradient_inversion": ModelAttackEntry(GradientInversion(), "text", "Does a shared gradient tell the text?"),
        "embedding_inversion": ModelAttackEntry(
            ActivationInversion(), "text", "Do hidden states at a cut tell the text?"
        ),
        "model_extraction": ModelAttackEntry(ModelClone(), "text", "Can it be copied by asking?"),
        "backdoor_leak": ModelAttackEntry(
            BackdoorSearch("backdoor_leak", "leak"), "chat", "Does it give away a trigger that it was taught?"
        ),
        "backdoor_inversion": ModelAttackEntry(
            BackdoorSearch("backdoor_inversion", "vocabulary"), "chat", "Is there a word that overrides every prompt?"
        ),
        "activation_clustering": ModelAttackEntry(
            PoisonedStates("activation_clustering", cluster_apart), "text", "Do planted texts form a group inside it?"
        ),
        "spectral_signatures": ModelAttackEntry(
            PoisonedStates("spectral_signatures", spectrum_apart), "text", "Do planted texts stand out inside it?"
        ),
        "planted_phrases": ModelAttackEntry(PlantedPhrases(), "text", "Has one source a phrase with one continuation?"),
        "rounding_pile": ModelAttackEntry(
            RoundingPile(), "rounded", "Were weights pushed to the borders of a rounding?"
        ),
        "rounded_answers": ModelAttackEntry(RoundedAnswers(), "rounded", "Does a rounded export behave otherwise?"),
        **{
            name: ModelAttackEntry(PromptedAttack(name), "prompts", "Do written prompts break its rules?")
            for name in PROMPTED
        },
    }
)
"""Every attack by name."""
