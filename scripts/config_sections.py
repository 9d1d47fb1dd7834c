"""The classes behind the tables of `docs/configuration.md`, and rows for keys that a table lacks.

`generated_pages.py` inserts a row for each new key, with the text of its docstring: rewrite it there for users. A row
that is there already is never changed; a test compares keys and defaults.
"""

import ast
import inspect
import itertools
import json
import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

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
from phalanx.train.sessions.site_file import SiteFile
from phalanx.train.train_section import (
    EarlyStoppingConfig,
    HistogramsConfig,
    LeakMeterConfig,
    SamplesConfig,
    StabilityConfig,
)
from phalanx.transport import TransportConfig

_ALGORITHMS: dict[str, type[BaseModel]] = {
    settings.model_fields["kind"].annotation.__args__[0]: settings for settings in AlgorithmConfig.__args__[0].__args__
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


_CELLS = re.compile(r"(?<!\\)\|")
_TYPES = {bool: "true or false", int: "integer", float: "number", str: "text"}


def key_tables(page: str) -> dict[str, dict[str, str]]:
    """Return the defaults by section and key, as the page has them."""
    tables: dict[str, dict[str, str]] = {}
    for section, cells in _table_rows(page):
        if cells[0].startswith("`"):
            tables[section][cells[0].strip("`")] = cells[2].replace("\\|", "|")
        else:
            tables[section] = {}
    return tables


def default_cell(model: type[BaseModel], key: str) -> str:
    """Return the cell of a key's default."""
    value = model.model_fields[key].default
    if value is PydanticUndefined:
        return "required"
    if value is None or isinstance(value, BaseModel):
        return "left out"
    return f"`{json.dumps(value)}`"


def with_new_keys(page: str) -> str:
    """Return the page with a row for each key that a table lacks, behind the table's last row."""
    tables, lines = key_tables(page), page.split("\n")
    for section, present in tables.items():
        model = SECTIONS[section]
        rows = [_row_of(model, key) for key in model.model_fields if key not in present]
        if rows:
            first = next(i for i, line in enumerate(lines) if line.startswith(f"| {section} | type | default |"))
            last = next(i for i, line in enumerate(lines[first:], first) if not line.startswith("|"))
            lines[last:last] = rows
    return "\n".join(lines)


def _table_rows(page: str) -> Iterator[tuple[str, list[str]]]:
    section = ""
    for line in page.splitlines():
        cells = [cell.strip() for cell in _CELLS.split(line)[1:-1]]
        if len(cells) == 4 and cells[1:] == ["type", "default", "meaning"]:
            section = cells[0]
            yield section, cells
        elif len(cells) == 4 and cells[0].startswith("`"):
            yield section, cells


def _row_of(model: type[BaseModel], key: str) -> str:
    cells = (
        f"`{key}`",
        _type_words(model.model_fields[key].annotation),
        default_cell(model, key),
        _meaning(model, key),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type_words(kind: Any) -> str:
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    arguments = [each for each in get_args(kind) if each is not NoneType]
    if get_origin(kind) is Literal:
        return " or ".join(f"`{json.dumps(each)}`" for each in arguments)
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_type_words(each) for each in arguments)
    if get_origin(kind) is tuple:
        return f"list of {_type_words(arguments[0])}"
    if inspect.isclass(kind) and issubclass(kind, BaseModel):
        return "section"
    return _TYPES.get(kind, getattr(kind, "__name__", str(kind)).lower())


def _meaning(model: type[BaseModel], key: str) -> str:
    """Return the text below a field, or its entry in the class's docstring."""
    for owner in model.__mro__:
        if key not in inspect.get_annotations(owner):
            continue
        (body,) = [node.body for node in ast.parse(inspect.getsource(owner)).body if isinstance(node, ast.ClassDef)]
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and ast.unparse(field.target) == key and isinstance(text, ast.Expr):
                return " ".join(ast.literal_eval(text.value).split())
        entry = re.search(rf"\n {{4}}{key}: (.+(?:\n {{8}}.+)*)", inspect.cleandoc(owner.__doc__ or ""))
        if entry is not None:
            return " ".join(entry[1].split())
    raise ValueError(f"{model.__name__}.{key}: has no docstring; write one, which becomes its row in configuration.md")
