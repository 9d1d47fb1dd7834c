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

from phalanx.errors import ConfigError, DiskError, KeyFileError, ModelError, PhalanxError
from phalanx.security.crypto import steady_now
from phalanx.serve.access import (
    KEYS_FILE,
    Access,
    KeyStore,
    ListenConfig,
    ModelOrder,
    RequestBounds,
    bind_socket,
    make_server,
    run_announced,
)
from phalanx.serve.access.listener import is_loopback
from phalanx.serve.api import Service, make_app
from phalanx.serve.chat_page import ChatPage
from phalanx.serve.engine import EnginePool, EngineSettings, HostedModel, ModelCard
from phalanx.serve.engine.hosted_model import Weights
from phalanx.serve.filters import FiltersConfig, TextFilters
from phalanx.serve.marks import MarkKeyRing, MarkPolicy, TokenMark
from phalanx.serve.observe import Gauge, ServerWatch, WatchConfig, WatchedServer, measure_models, read_texts
from phalanx.serve.stages import StagedModel, StageRelay, StagesConfig, open_staged_model
from phalanx.serve.where import open_text_model

_log = logging.getLogger(__name__)
_ORDERS_S = 1.0
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
        has_chat_page: Whether browsers are shown the chat page at ``/``.
        page_names: Names under which a proxy lets browsers open the chat page.
        link_key: Id of a key, or its owner, that a link signs a browser on this machine in as.
        stages: Parties that hold the middle layers of the one model; None runs all layers here.
        seal_texts: Public half of the key for which texts are sealed in the log; None logs none.
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
    watch: WatchConfig = field(default_factory=WatchConfig)
    weights: Weights = "float"
    drain_s: int = 30
    num_threads: int = 0
    own_code: bool = False
    has_chat_page: bool = True
    page_names: tuple[str, ...] = ()
    link_key: str | None = None
    stages: StagesConfig | None = None
    seal_texts: Path | None = None


@dataclass(frozen=True)
class Listening:
    """A server that takes requests.

    Attributes:
        url: Its address, with the port that the system chose.
        chat_link: Opens the chat page and signs in, once, within ten minutes; what it is by stands behind the ``#``,
            which no browser sends.
    """

    url: str
    cards: tuple[ModelCard, ...]
    chat_link: str | None = None


def check_access(directory: Path) -> None:
    """Return where a directory holds keys: a server without any would be closed to everybody."""
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
    """
    check_access(plan.access)
    mark = TokenMark(plan.mark, None if plan.mark_keys is None else MarkKeyRing.read(plan.mark_keys).newest)
    if plan.num_threads:
        torch.set_num_threads(plan.num_threads)
    with (
        contextlib.closing(bind_socket(plan.listen)) as sock,
        Access.open(plan.access, seal_texts=plan.seal_texts) as access,
        contextlib.ExitStack() as stack,
    ):
        if access.key_store.fault is not None:
            raise KeyFileError(access.key_store.fault)
        link_key = find_link_key(plan, access.key_store)
        staged = None if plan.stages is None else stack.enter_context(_open_stages(plan, plan.stages, access))
        models = _open_models(plan, access) if staged is None else [staged]
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
            url = f"{scheme}://{address}:{port}"
            secret = None if link_key is None else access.key_store.sessions.make_link(link_key)
            listening = Listening(url, pool.cards, None if secret is None else f"{url}/#link={secret}")
            relay = None if staged is None else staged.relay
            server = _Server(Service(pool, access, filters), plan, lambda: announce(listening), relay)
            server.serve_on(sock)


def find_link_key(plan: ServerPlan, key_store: KeyStore) -> str | None:
    """Return the id of the key that a link signs in as; None where no link is wanted.

    Raises:
        ConfigError: Not exactly one active key is meant, or no browser on this machine could use the link.
    """
    if plan.link_key is None:
        return None
    if not plan.has_chat_page or not is_loopback(plan.listen.host):
        raise ConfigError(
            "chat link: is for a browser on this machine and the chat page, and the server has another address or no "
            "page; leave --chat-link out, and sign in with a key"
        )
    now = steady_now().timestamp()
    key_ids = [
        record.key_id
        for record in key_store.list_keys()
        if plan.link_key in {record.key_id, record.terms.owner} and record.is_active(now)
    ]
    if len(key_ids) != 1:
        raise ConfigError(
            f"chat link: {len(key_ids)} active keys are called {plan.link_key[:40]!r}, 1 is needed; "
            "give the id of a key, as `phalanx keys list` shows it"
        )
    return key_ids[0]


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


def _open_models(plan: ServerPlan, access: Access) -> list[HostedModel]:
    orders = {order.model: order.checkpoint for order in access.key_store.list_orders() if order.checkpoint}
    return [_open_model(plan, name, Path(orders.get(name, where))) for name, where in plan.models.items()]


def _open_model(plan: ServerPlan, name: str, where: Path) -> HostedModel:
    text_model = open_text_model(where, own_code=plan.own_code)
    adapters = plan.adapters if name == next(iter(plan.models)) else MappingProxyType({})
    model = HostedModel(name, text_model, int(time.time()), adapters, plan.weights)
    model.warm_up()
    return model


def _describe_pool(pool: EnginePool, plan: ServerPlan) -> WatchedServer:
    running = Gauge(
        "phalanx_running_requests",
        "Texts that an engine writes.",
        ("engine",),
        lambda: {(engine.served.name,): float(engine.num_running) for engine in pool.engines},
    )
    waiting = Gauge(
        "phalanx_waiting_requests",
        "Requests in the queue of an engine.",
        ("engine",),
        lambda: {(engine.served.name,): float(engine.num_waiting) for engine in pool.engines},
    )
    path = plan.watch.alerts.reference.texts
    texts, texts_digest = ([], "") if path is None else read_texts(path)
    return WatchedServer(
        plan.access,
        lambda: {card.digest: card.id for card in pool.cards},
        lambda: {card.id: card.digest for card in pool.cards},
        (running, waiting),
        None if path is None else (lambda: measure_models(pool, texts)),
        texts_digest,
    )


class _Server:
    """One server from its start to its end."""

    def __init__(
        self, service: Service, plan: ServerPlan, announce: Callable[[], None], relay: StageRelay | None = None
    ) -> None:
        self._service, self._announce, self._plan, self._relay = service, announce, plan, relay
        self._fault: DiskError | None = None
        self._watch = ServerWatch(plan.watch, _describe_pool(service.pool, plan), service.access.request_log)
        app = make_app(service, plan.bounds, is_ready=self._is_ready, lifespan=self._run_beside, watch=self._watch)
        if plan.has_chat_page:
            app = ChatPage(app, [plan.listen.host, *plan.page_names])
        self._server = make_server(app, plan.listen, plan.bounds, plan.drain_s)

    def _is_ready(self) -> bool:
        return not self._server.should_exit

    @contextlib.asynccontextmanager
    async def _run_beside(self) -> AsyncIterator[None]:
        """Keep counts and log on disk while the server runs."""
        access, cards = self._service.access, self._service.pool.cards
        sync, orders = asyncio.create_task(self._sync_or_stop()), asyncio.create_task(self._follow_orders())
        access.request_log.record_event("server_started", {card.id: card.digest for card in cards})
        self._listen_to_stages(asyncio.get_running_loop())
        try:
            async with self._watch.run_checks():
                yield
        finally:
            if self._relay is not None:
                self._relay.listen(None)
            for task in (sync, orders):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
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

    async def _follow_orders(self) -> None:
        """Open the files that the operator has ordered in the place of a model's, again and again."""
        refused: set[ModelOrder] = set()
        while True:
            await asyncio.sleep(_ORDERS_S)
            with contextlib.suppress(KeyFileError):
                for order in self._service.access.key_store.list_orders():
                    is_other = order.model in self._plan.models and not self._service.has_digest(order)
                    if order.checkpoint and is_other and order not in refused:
                        refused.add(order)
                        await self._replace_model(order)

    async def _replace_model(self, order: ModelOrder) -> None:
        log = self._service.access.request_log
        try:
            model = await asyncio.to_thread(_open_model, self._plan, order.model, Path(order.checkpoint))
            card = model.cards[0]
            if card.digest not in order.digests:
                raise ModelError(f"{order.checkpoint}: has digest {card.digest:.12}..., which the order does not name")
            await asyncio.to_thread(self._service.pool.replace_model, model)
        except PhalanxError as exc:
            _log.error("%s stays out of service: %s", order.model, exc)
            log.record_event("model_not_replaced", {"model": order.model})
            return
        _log.warning("%s: now has the files of %s", order.model, order.checkpoint)
        log.record_event("model_replaced", {"model": order.model, "digest": card.digest})

    def serve_on(self, sock: socket.socket) -> None:
        """Serve on a socket that is bound."""
        run_announced(self._server, sock, self._announce)
        if self._fault is not None:
            raise self._fault
