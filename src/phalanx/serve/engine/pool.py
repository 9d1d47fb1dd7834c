"""Every model that one process serves, each with its engine."""

import asyncio
from collections.abc import Sequence

from phalanx.closing import Closeable
from phalanx.errors import ConfigError, ModelError
from phalanx.serve.engine.batcher import BatchingEngine, EngineSettings
from phalanx.serve.engine.hosted_model import HostedModel, ModelCard
from phalanx.serve.engine.jobs import EventStream
from phalanx.serve.engine.request import GenerationRequest
from phalanx.serve.marks import TokenMark


class UnknownModelError(ModelError):
    """No model of this id is served, or the key may not use it."""


class EnginePool(Closeable):
    """The engines by the ids of their models and adapters.

    Raises:
        ConfigError: Two models or adapters have one id.
    """

    def __init__(self, models: Sequence[HostedModel], settings: EngineSettings, mark: TokenMark) -> None:
        self._settings, self._mark = settings, mark
        self._cards: dict[str, ModelCard] = {}
        self._engines: dict[str, BatchingEngine] = {}
        for card in (card for model in models for card in model.cards):
            if card.id in self._cards:
                raise ConfigError(f"two models have the id {card.id!r}; name one of them: NAME=DIR")
            self._cards[card.id] = card
        for model in models:
            engine = BatchingEngine(model, settings, mark)
            self._engines |= {card.id: engine for card in model.cards}

    def replace_model(self, model: HostedModel) -> None:
        """Replace the model of the same id, with its adapters; texts that are being written end."""
        old = self._engines[model.name]
        engine = BatchingEngine(model, self._settings, self._mark)
        cards = {name: card for name, card in self._cards.items() if self._engines[name] is not old}
        engines = {name: other for name, other in self._engines.items() if other is not old}
        # the engines first: a card whose engine is not there yet would be a fault
        self._engines = {**self._engines, **{card.id: engine for card in model.cards}}
        self._cards = {**{card.id: card for card in model.cards}, **cards}
        self._engines = {**engines, **{card.id: engine for card in model.cards}}
        old.close()

    @property
    def cards(self) -> tuple[ModelCard, ...]:
        """All models and adapters."""
        return tuple(self._cards.values())

    @property
    def engines(self) -> tuple[BatchingEngine, ...]:
        """Each model's engine once."""
        return tuple(dict.fromkeys(self._engines.values()))

    def find_card(self, model_id: str) -> ModelCard:
        """Return the model of an id.

        Raises:
            UnknownModelError: There is none.
        """
        card = self._cards.get(model_id)
        if card is None:
            raise UnknownModelError("no such model; GET /v1/models lists those that the key may use")
        return card

    def digests_of(self, card: ModelCard) -> list[tuple[str, str]]:
        """Return the id and digest of a model, and of its base."""
        base = None if card.base is None else self.find_card(card.base)
        return [(card.id, card.digest), *([] if base is None else [(base.id, base.digest)])]

    def find_engine(self, model_id: str) -> BatchingEngine:
        """Return the engine that runs a model.

        Raises:
            UnknownModelError: There is none.
        """
        return self._engines[self.find_card(model_id).id]

    async def encode_prompt(self, request: GenerationRequest) -> tuple[int, ...]:
        """Return the prompt of a request in tokens.

        Raises:
            BadRequestError: It does not fit, or the template does not render it.
        """
        served = self.find_engine(request.model).served
        return await asyncio.to_thread(served.encode_prompt, request)

    async def open_events(self, request: GenerationRequest, prompt: tuple[int, ...]) -> EventStream:
        """Queue a request, as `BatchingEngine.open_events`."""
        card = self.find_card(request.model)
        return await self._engines[card.id].open_events(request, prompt, card.adapter)

    async def embed_texts(self, model_id: str, texts: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Return one vector a text, as `BatchingEngine.embed_texts`."""
        card = self.find_card(model_id)
        return await self._engines[card.id].embed_texts(texts, card.adapter)

    def close(self) -> None:
        """End all engines."""
        for engine in self.engines:
            engine.close()
