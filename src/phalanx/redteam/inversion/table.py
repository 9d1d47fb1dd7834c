"""The table of attacks on privacy: the inputs and gains of each, its countermeasure, and its authors."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class PrivacyAttackEntry:
    """One line of the table.

    Attributes:
        attack: Name of the class or function.
        sees: Data that the attacker needs in the clear.
        stopped_by: Guards under which it wins no more than chance.
        source: First description of the attack.
    """

    attack: str
    sees: str
    wins: str
    stopped_by: tuple[str, ...]
    source: str


_CUT = ("sealed", "masked")

PRIVACY_ATTACKS: Mapping[str, PrivacyAttackEntry] = MappingProxyType(
    {
        "nearest_neighbour": PrivacyAttackEntry(
            "NearestNeighbour", "activations of a cut", "tokens", _CUT, "Song and Raghunathan 2020"
        ),
        "linear_map": PrivacyAttackEntry(
            "LinearMap", "activations of a cut, and of known text", "tokens", _CUT, "Song and Raghunathan 2020"
        ),
        "trained_inverter": PrivacyAttackEntry(
            "TrainedInverter", "activations of a cut, and of known text", "tokens", _CUT, "Morris et al. 2023"
        ),
        "candidate_search": PrivacyAttackEntry(
            "CandidateSearch", "activations of a cut", "tokens", _CUT, "Nikolaou et al. 2025 (SipIt)"
        ),
        "gradient_search": PrivacyAttackEntry(
            "GradientSearch", "activations of a cut", "tokens", ("sealed", "noise"), "Zhu et al. 2019 (DLG)"
        ),
        "text_property": PrivacyAttackEntry(
            "TextProperty",
            "activations of a cut, and of texts with a known property",
            "domain",
            _CUT,
            "Pan et al. 2020",
        ),
        "span_check": PrivacyAttackEntry(
            "SpanCheck",
            "one batch's adapter gradient",
            "tokens of the batch",
            ("sealed",),
            "Petrov et al. 2024 (DAGER)",
        ),
        "released_update": PrivacyAttackEntry(
            "SpanCheck.tokens_of_update",
            "the adapter before and after one client's step",
            "tokens of the batch",
            ("release policy",),
            "Petrov et al. 2024 (DAGER)",
        ),
        "logit_gradients": PrivacyAttackEntry(
            "labels_of_logit_gradients", "gradients of logits", "labels", _CUT, "Zhao et al. 2020 (iDLG)"
        ),
        "cut_gradients": PrivacyAttackEntry(
            "LabelsByDirection", "gradients of a cut, and of known labels", "labels", _CUT, "Li et al. 2022"
        ),
        "next_tokens": PrivacyAttackEntry(
            "LinearMap", "gradients of a cut, and of known text", "next tokens", ("sealed", "noise"), "Li et al. 2022"
        ),
    }
)
