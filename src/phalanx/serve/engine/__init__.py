"""The engine: many texts of many clients in one batch, with a cache of keys and values for each."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names
from phalanx.serve.engine.request import (
    BadRequestError as BadRequestError,
    ChoiceEnd as ChoiceEnd,
    EngineBusyError as EngineBusyError,
    Event as Event,
    GenerationRequest as GenerationRequest,
    Grammar as Grammar,
    PromptRead as PromptRead,
    SamplingSettings as SamplingSettings,
    TextPiece as TextPiece,
    TokenScore as TokenScore,
    Tool as Tool,
)

if TYPE_CHECKING:
    from phalanx.serve.engine.batcher import BatchingEngine as BatchingEngine, EngineSettings as EngineSettings
    from phalanx.serve.engine.jobs import EventStream as EventStream, collect_events as collect_events
    from phalanx.serve.engine.pool import EnginePool as EnginePool, UnknownModelError as UnknownModelError
    from phalanx.serve.engine.hosted_model import HostedModel as HostedModel, ModelCard as ModelCard
    from phalanx.serve.engine.tools import ToolReader as ToolReader, describe_call as describe_call


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
