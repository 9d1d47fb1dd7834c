"""The engine: many texts of many clients in one batch, with a cache of keys and values for each."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names
from phalanx.serve.engine.request import (
    BadRequestError,
    ChoiceEnd,
    EngineBusyError,
    Event,
    GenerationRequest,
    Grammar,
    PromptRead,
    SamplingSettings,
    TextPiece,
    TokenScore,
    Tool,
)

if TYPE_CHECKING:
    from phalanx.serve.engine.batcher import BatchingEngine, EngineSettings, EventStream, collect_events
    from phalanx.serve.engine.pool import EnginePool, UnknownModelError
    from phalanx.serve.engine.served_model import ModelCard, ServedModel
    from phalanx.serve.engine.tools import ToolReader, describe_call

__all__ = [
    "BadRequestError",
    "BatchingEngine",
    "ChoiceEnd",
    "EngineBusyError",
    "EnginePool",
    "EngineSettings",
    "Event",
    "EventStream",
    "GenerationRequest",
    "Grammar",
    "ModelCard",
    "PromptRead",
    "SamplingSettings",
    "ServedModel",
    "TextPiece",
    "TokenScore",
    "Tool",
    "ToolReader",
    "UnknownModelError",
    "collect_events",
    "describe_call",
]


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
