"""docs/configuration.md has every key of the run file and the worker file, with its default."""

import json
import re
from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from phalanx.checkpoint import CheckpointConfig
from phalanx.data import BpeConfig, DataConfig
from phalanx.data.chat.settings import (
    ConversationsConfig,
    ConversationSource,
    PreferencesConfig,
    PreferenceSource,
)
from phalanx.data.config import (
    FileTokenizerConfig,
    LabelledConfig,
    ModelTokenizerConfig,
    OwnTaskConfig,
    ValidationSetConfig,
)
from phalanx.data.phases import CurriculumConfig, DatasetConfig, PhaseConfig, StreamConfig, UntilConfig
from phalanx.data.sources import SOURCES, OwnSourceConfig
from phalanx.federated.config import AlgorithmConfig, EnclaveSumsConfig, FederatedConfig, SitePrivacyConfig
from phalanx.models import LoraConfig, ModelConfig, PrefixConfig, PromptEncoderConfig, SpfConfig
from phalanx.objectives.policy_gradient import GrpoSettings
from phalanx.objectives.ppo import PpoSettings
from phalanx.objectives.pretraining import (
    DenoisersSettings,
    FillInTheMiddleSettings,
    MaskedSettings,
    SpanCorruptionSettings,
)
from phalanx.objectives.pretraining.denoisers import DenoiserConfig
from phalanx.optimizers import OptimizerConfig
from phalanx.parallel import ParallelConfig
from phalanx.parallel.config import OuterConfig
from phalanx.parallel.deepspeed import DeepSpeedConfig
from phalanx.parallel.deepspeed.config import AioConfig
from phalanx.pipeline import AttackConfig, GuardConfig, PartyLayout, PipelineConfig, WorkerConfig
from phalanx.policy import PolicyReference
from phalanx.rewards import RewardsConfig
from phalanx.rewards.config import REWARDS, OwnReward
from phalanx.rollouts import RolloutCheck, RolloutsConfig, RolloutTolerance, RolloutWorkerConfig
from phalanx.security.privacy.config import PrivacyConfig
from phalanx.security.seal import ReleasePolicy
from phalanx.split import SplitConfig
from phalanx.split.admission.config import ClientAdmissionConfig
from phalanx.split.masked import MaskedConfig, MaskedWorkerConfig
from phalanx.telemetry.sinks import MlflowConfig, OwnSinkConfig, TrackioConfig, WandbConfig
from phalanx.train import TrainConfig
from phalanx.train.parties.client_file import ClientFile
from phalanx.train.runs.base import EvaluateConfig
from phalanx.train.runs.mixed import FurtherData, FurtherObjective
from phalanx.train.runs.support import SECTIONS as ALL_SECTIONS
from phalanx.train.sessions.site_file import SiteFile
from phalanx.train.train_section import (
    EarlyStoppingConfig,
    HistogramsConfig,
    LeakMeterConfig,
    SamplesConfig,
    StabilityConfig,
)
from phalanx.transport import TransportConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
_ALGORITHMS: dict[str, type[BaseModel]] = {
    one.model_fields["kind"].annotation.__args__[0]: one for one in AlgorithmConfig.__args__[0].__args__
}
SECTIONS: dict[str, type[BaseModel]] = {
    "model": ModelConfig,
    "model.adapter": LoraConfig,
    "model.adapter spf": SpfConfig,
    "model.adapter ptuning": PrefixConfig,
    "model.adapter prompt_encoder": PromptEncoderConfig,
    "privacy": PrivacyConfig,
    "leak_meter": LeakMeterConfig,
    "policy": PolicyReference,
    "data": DataConfig,
    "data.dataset": DatasetConfig,
    "data.dataset.stream": StreamConfig,
    "data.conversations": ConversationsConfig,
    "data.conversations.sources": ConversationSource,
    "data.phases": PhaseConfig,
    "data.phases.until": UntilConfig,
    "data.phases.curriculum": CurriculumConfig,
    "data.preferences": PreferencesConfig,
    "data.preferences.sources": PreferenceSource,
    "data.labelled": LabelledConfig,
    "data.validation": ValidationSetConfig,
    "data.labelled.task": OwnTaskConfig,
    **{f"data.sources {kind}": SOURCES[kind].config for kind in SOURCES if "path" in SOURCES[kind].config.model_fields},
    "data.sources module:object": OwnSourceConfig,
    "data.tokenizer bpe": BpeConfig,
    "data.tokenizer model": ModelTokenizerConfig,
    "data.tokenizer file": FileTokenizerConfig,
    "train": TrainConfig,
    "objectives": FurtherObjective,
    "objectives.data": FurtherData,
    "train.early_stopping": EarlyStoppingConfig,
    "train.samples": SamplesConfig,
    "train.objective grpo": GrpoSettings,
    "train.objective ppo": PpoSettings,
    "train.objective masked": MaskedSettings,
    "train.objective span_corruption": SpanCorruptionSettings,
    "train.objective fill_in_the_middle": FillInTheMiddleSettings,
    "train.objective denoisers": DenoisersSettings,
    "train.objective.tasks": DenoiserConfig,
    "train.histograms": HistogramsConfig,
    "train.stability": StabilityConfig,
    "optimizer": OptimizerConfig,
    "parallel": ParallelConfig,
    "parallel.outer": OuterConfig,
    "deepspeed": DeepSpeedConfig,
    "deepspeed.aio": AioConfig,
    "evaluate": EvaluateConfig,
    "split": SplitConfig,
    "federated": FederatedConfig,
    "federated.privacy": SitePrivacyConfig,
    "federated.enclave": EnclaveSumsConfig,
    **{f"federated.algorithm {kind}": settings for kind, settings in _ALGORITHMS.items()},
    "split.admission": ClientAdmissionConfig,
    "split.release": ReleasePolicy,
    "pipeline": PipelineConfig,
    "pipeline.transport": TransportConfig,
    "guard": GuardConfig,
    "attack": AttackConfig,
    "checkpoint": CheckpointConfig,
    "rewards": RewardsConfig,
    **{f"rewards.of {kind}": settings for kind, settings in REWARDS.items()},
    "rewards.of module:object": OwnReward,
    "rollouts": RolloutsConfig,
    "rollouts.check": RolloutCheck,
    "rollouts.check.tolerance": RolloutTolerance,
    "rollout worker": RolloutWorkerConfig,
    "tracking.wandb": WandbConfig,
    "tracking.mlflow": MlflowConfig,
    "tracking.trackio": TrackioConfig,
    "tracking.module:object": OwnSinkConfig,
    "worker": WorkerConfig,
    "client": ClientFile,
    "site": SiteFile,
    "worker.parallel": PartyLayout,
    "masked": MaskedConfig,
    "masked worker": MaskedWorkerConfig,
}


def tables():
    """Defaults by section and key, as the page has them."""
    found: dict[str, dict[str, str]] = {}
    section = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and cells[1:] == ["type", "default", "meaning"]:
            section = cells[0]
            found[section] = {}
        elif len(cells) == 4 and cells[0].startswith("`"):
            found[section][cells[0].strip("`")] = cells[2].replace("\\|", "|")
    return found


def default_of(model, key):
    value = model.model_fields[key].default
    if value is PydanticUndefined:
        return "required"
    if value is None or isinstance(value, BaseModel):
        return "left out"
    return f"`{json.dumps(value)}`"


def test_the_page_has_a_table_for_every_section():
    assert set(tables()) == set(SECTIONS)
    # a section of the run file that this test does not know would go undocumented
    assert set(ALL_SECTIONS) <= {name.partition(".")[0] for name in SECTIONS}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_on_the_page_with_its_default(section):
    model = SECTIONS[section]

    assert tables()[section] == {key: default_of(model, key) for key in model.model_fields}


def test_the_attacks_on_the_page_are_those_in_the_table():
    from phalanx.lab.attacks import ATTACKS

    (line,) = [line for line in PAGE.read_text().splitlines() if "phalanx.lab.attacks.ATTACKS" in line]

    assert set(re.findall(r"`([a-z0-9_]+)`", line.rpartition(":")[2])) == set(ATTACKS)
