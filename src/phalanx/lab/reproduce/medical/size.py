"""The sizes of the comparison: models, texts and steps."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from phalanx.data.tasks import TEST_SHARE
from phalanx.models import LoraConfig, ModelConfig
from phalanx.optimizers import OptimizerConfig

MODEL = ModelConfig(name="smollm2-135m")
CLIENTS = 4
ALPHA = 0.5
"""Of the Dirichlet distribution by which classes are shared out, where a task has no silos of its own."""
NOISE = 0.25
"""Standard deviation of the noised split, for each number of a token's hidden states, clipped to length 1."""
DELTA = 1e-5
EPSILON = 8.0
"""Of each text in all rounds of the private arm."""


@dataclass(frozen=True)
class MedicalSize:
    """The sizes of the medical comparison, which --quick makes smaller.

    Attributes:
        train: Training texts, as many of each client.
        tokens: Maximum tokens of a text; longer texts are cut off.
        epochs: Passes over the training texts, and rounds of federated averaging.
        layers: First blocks of the model that are used at all.
        cut: Number of layers at the client.
        rows: Texts of a microbatch; one microbatch of each client makes a step.
        arms: Names of the arms; all of them where it is empty.
    """

    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    train: int
    test: int
    tokens: int
    epochs: int
    layers: int = 6
    cut: int = 5
    rows: int = 4
    rank: int = 8
    lr: float = 2e-3
    arms: tuple[str, ...] = ()

    @property
    def adapter_config(self) -> LoraConfig:
        """LoRA on the family's usual projections."""
        return LoraConfig(rank=self.rank, alpha=2.0 * self.rank)

    @property
    def optimizer_config(self) -> OptimizerConfig:
        """AdamW."""
        return OptimizerConfig(lr=self.lr, betas=(0.9, 0.999), weight_decay=0.0, schedule="constant")


_ORDER = ("icd10", "medical_abstracts", "medquad", "pubmedqa", "drug_reviews", "pubmedqa_sections")
SIZES: Mapping[str, MedicalSize] = MappingProxyType(
    {
        "full": MedicalSize(tasks=_ORDER, seeds=(0, 1, 2), train=128, test=160, tokens=16, epochs=8),
        "quick": MedicalSize(tasks=_ORDER[:3], seeds=(0,), train=64, test=80, tokens=16, epochs=4),
    }
)
_SPLITS = ("split_plain", "split_sealed")
DOMAINS = "domains"
"""Name of the table with texts that are not medical."""
DOMAIN_SIZES: Mapping[str, MedicalSize] = MappingProxyType(
    {
        "full": replace(
            SIZES["full"],
            tasks=("reuters_topics", "python_functions"),
            seeds=(0, 1, 2, 3, 4),
            arms=("tfidf", "tfidf_cut", "centralised", "local", "fedavg", "fedavg_secure", *_SPLITS),
        )
    }
)


def describe_medical_size(size: MedicalSize) -> dict[str, Any]:
    """Everything that decides a figure and is not in its row; which tasks, seeds and arms there are decides none."""
    size_fields = {name: value for name, value in asdict(size).items() if name not in ("tasks", "seeds", "arms")}
    return size_fields | {
        "model": MODEL.name,
        "clients": CLIENTS,
        "alpha": ALPHA,
        "test_share": TEST_SHARE,
        "noise": NOISE,
        "delta": DELTA,
        "epsilon": EPSILON,
        "adapter": size.adapter_config.model_dump(mode="json"),
        "optimizer": size.optimizer_config.model_dump(mode="json"),
    }
