"""The server process: models are opened, its port is bound, and it drains when it is told to stop."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch

from phalanx.errors import ConfigError, DiskError, KeyFileError
from phalanx.serve.access import KEYS_FILE, Access, ListenConfig, RequestBounds, bind_socket, make_server
from phalanx.serve.api import Service, make_app
from phalanx.serve.engine import EnginePool, EngineSettings, HostedModel, ModelCard
from phalanx.serve.engine.hosted_model import Weights
from phalanx.serve.filters import FiltersConfig, TextFilters
from phalanx.serve.marks import MarkKeyRing, MarkPolicy, TokenMark
from phalanx.serve.stages import StagedModel, StageRelay, StagesConfig, open_staged_model
from phalanx.serve.where import open_text_model

_log = logging.getLogger(__name__)
_NO_PREFIXES = {"max_owner_prefix_tokens": 0}


@dataclass(frozen=True)
class ServerPlan:
    """What a server serves, to whom, and where.

    Attributes:
        models: A run, a checkpoint or a model directory by the id that clients name.
        adapters: Directories in peft's format by id; each stands on the first model.
        access: Directory of keys, budgets and log.
        weights: Numbers in which linear layers compute.
        drain_s: Seconds that requests have to end after SIGTERM.
        mark_keys: Key file of `phalanx mark new-keys`.
        num_threads: Threads of torch; 0 leaves them as they are.
        stages: Parties that hold the middle layers of the one model; None runs all layers here.
    """

    models: Mapping[str, Path]
    access: Path
    adapters: Mapping[str, Path] = field(default_factory=lambda: MappingProxyType({}))
    listen: ListenConfig = field(default_factory=ListenConfig)
    bounds: RequestBounds = field(default_factory=RequestBounds)
    engine: EngineSettings = field(default_factory=EngineSettings)
    filters: FiltersConfig = field(default_factory=FiltersConfig)
    mark: MarkPolicy = field(default_factory=lambda: MarkPolicy(mark="off"))
    mark_keys: Path | None = None
    weights: Weights = "float"
    drain_s: int = 30
    num_threads: int = 0
    own_code: bool = False
    stages: StagesConfig | None = None


@dataclass(frozen=True)
class Listening:
    """A server that takes requests.

    Attributes:
        url: Its address, with the port that the system chose.
    """

    url: str
    cards: tuple[ModelCard, ...]


def check_access(directory: Path) -> None:
    """Return where a directory holds keys: a server without any would be closed to everybody.

    Raises:
        ConfigError: It holds none.
    """
    if not (directory / KEYS_FILE).is_file():
        raise ConfigError(
            f"{directory}: holds no API keys, and no request is answered without one; make the first by "
            f"`phalanx keys create --owner NAME --access {directory}`"
        )


def run_server(plan: ServerPlan, announce: Callable[[Listening], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; requests that are being answered end first.

    Args:
        announce: Is told the address once requests are taken.

    Raises:
        ConfigError: There is no key, or the port, a certificate or an id cannot be had.
        KeyFileError: The keys were altered.
        ModelError: A model or adapter cannot be served.
    """
    check_access(plan.access)
    mark = TokenMark(plan.mark, None if plan.mark_keys is None else MarkKeyRing.read(plan.mark_keys).newest)
    if plan.num_threads:
        torch.set_num_threads(plan.num_threads)
    with (
        contextlib.closing(bind_socket(plan.listen)) as sock,
        Access.open(plan.access) as access,
        contextlib.ExitStack() as stack,
    ):
        if access.key_store.fault is not None:
            raise KeyFileError(access.key_store.fault)
        staged = None if plan.stages is None else stack.enter_context(_open_stages(plan, plan.stages, access))
        models = _open_models(plan) if staged is None else [staged]
        tokens = {
            token.content
            for model in models
            for token in model.backend.get_added_tokens_decoder().values()
            if token.special
        }
        filters = TextFilters(plan.filters, sorted(tokens))
        engine = plan.engine if staged is None else plan.engine.model_copy(update=_NO_PREFIXES)
        with EnginePool(models, engine, mark) as pool:
            host, port = sock.getsockname()[:2]
            scheme = "http" if plan.listen.certificate is None else "https"
            address = f"[{host}]" if ":" in host else host
            listening = Listening(f"{scheme}://{address}:{port}", pool.cards)
            relay = None if staged is None else staged.relay
            server = _Server(Service(pool, access, filters), plan, lambda: announce(listening), relay)
            server.serve_on(sock)


@contextlib.contextmanager
def _open_stages(plan: ServerPlan, config: StagesConfig, access: Access) -> Iterator[StagedModel]:
    """Open the one model of a plan with stages; what does not go together with them is refused by name."""
    refused = {
        "--model": len(plan.models) > 1,
        "--adapter": bool(plan.adapters),
        "--int8": plan.weights != "float",
        "--own-code": plan.own_code,
    }
    for option, is_given in refused.items():
        if is_given:
            raise ConfigError(f"{option}: is not served together with --stages; leave one of them out")
    ((name, where),) = plan.models.items()
    engine = plan.engine.model_copy(update=_NO_PREFIXES)

    def announce(address: str) -> None:
        _log.warning("stages: %s are awaited at %s", ", ".join(config.parties), address)

    with open_staged_model(name, where, config, engine, plan.access, announce) as model:
        yield model
    # the last checks end behind the last answer
    model.relay.listen(access.request_log.record_event)


def _open_models(plan: ServerPlan) -> list[HostedModel]:
    models = []
    created = int(time.time())
    for number, (name, where) in enumerate(plan.models.items()):
        text_model = open_text_model(where, own_code=plan.own_code)
        adapters = plan.adapters if number == 0 else MappingProxyType({})
        models.append(HostedModel(name, text_model, created, adapters, plan.weights))
    return models


class _Server:
    """One server from its start to its end."""

    def __init__(
        self, service: Service, plan: ServerPlan, announce: Callable[[], None], relay: StageRelay | None = None
    ) -> None:
        self._service, self._announce, self._relay = service, announce, relay
        self._fault: DiskError | None = None
        app = make_app(service, plan.bounds, is_ready=self._is_ready, lifespan=self._run_beside)
        self._server = make_server(app, plan.listen, plan.bounds, plan.drain_s)

    def _is_ready(self) -> bool:
        return not self._server.should_exit

    @contextlib.asynccontextmanager
    async def _run_beside(self) -> AsyncIterator[None]:
        """Keep counts and log on disk while the server runs."""
        access, cards = self._service.access, self._service.pool.cards
        sync = asyncio.create_task(self._sync_or_stop())
        access.request_log.record_event("server_started", {card.id: card.digest for card in cards})
        self._listen_to_stages(asyncio.get_running_loop())
        try:
            yield
        finally:
            if self._relay is not None:
                self._relay.listen(None)
            sync.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sync
            if self._fault is None:
                access.request_log.record_event("server_stopped", {})

    def _listen_to_stages(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have what happens at stages written to the log, by the server's own task."""
        if self._relay is None:
            return

        def tell(kind: str, facts: Mapping[str, str | int]) -> None:
            loop.call_soon_threadsafe(self._record_event, kind, facts)

        self._relay.listen(tell)

    def _record_event(self, kind: str, facts: Mapping[str, str | int]) -> None:
        try:
            self._service.access.request_log.record_event(kind, facts)
        except DiskError as exc:
            _log.error("the server ends: %s", exc)
            self._fault = exc
            self._server.should_exit = True

    async def _sync_or_stop(self) -> None:
        try:
            await self._service.access.keep_synced()
        except DiskError as exc:
            # what cannot be recorded must not be answered
            _log.error("the server ends: %s", exc)
            self._fault = exc
            self._server.should_exit = True

    def serve_on(self, sock: socket.socket) -> None:
        """Serve on a socket that is bound.

        Raises:
            DiskError: The log or the budgets could not be written.
        """
        asyncio.run(self._serve(sock))
        if self._fault is not None:
            raise self._fault

    async def _serve(self, sock: socket.socket) -> None:
        serving = asyncio.create_task(self._server.serve(sockets=[sock]))
        while not (self._server.started or serving.done()):
            await asyncio.sleep(0.01)
        if self._server.started:
            self._announce()
        await serving
