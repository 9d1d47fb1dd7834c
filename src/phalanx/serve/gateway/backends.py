"""Engines behind a gateway: the choice of one for a request, and requests that are never worked on twice."""

import asyncio
import logging
import secrets
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2

from phalanx.config import canonical_json
from phalanx.errors import ConfigError, PeerGoneError, PeerLostError
from phalanx.security.crypto import digest_hex, in_domain, read_private
from phalanx.serve.access.refusals import RequestRefused
from phalanx.serve.engine_links import EngineLinks, EngineReply
from phalanx.serve.gateway.config import BackendConfig
from phalanx.serve.gateway.requests import ForwardedRequest

_log = logging.getLogger(__name__)
_HEALTH_PATH = "/v1/models"
_BUSY_STATUSES = frozenset({429, 503})
"""Statuses by which an engine says that it has not begun to work on the request."""
_RETRY_AFTER_S = 2
_JSON = ("content-type", "application/json")
_PROTOCOL_HEADERS = {"messages": (_JSON, ("anthropic-version", "2023-06-01"))}
_HEALTH_TIMEOUT_S = 5.0


class RemoteEngine:
    """One engine.

    Args:
        max_answer_s: Seconds until the head of an answer is there.

    Raises:
        CertificateError: The file of its key cannot be read.
        ConfigError: Its authority cannot be read.

    Attributes:
        num_open: Requests that it answers at present.
    """

    def __init__(self, config: BackendConfig, max_answer_s: float) -> None:
        self.config, self._max_answer_s = config, max_answer_s
        self.num_open = 0
        self.is_healthy = True
        self._salt = secrets.token_bytes(32)
        headers = {"accept": "*/*", "accept-encoding": "identity", "user-agent": "phalanx-gateway"}
        if config.secret_file is not None:
            secret = read_private(config.secret_file, "your provider gives it").decode("latin-1").strip()
            headers["authorization"] = f"Bearer {secret}"
        self._links = EngineLinks(config.url, _tls(config), headers, config.connect_timeout_s, config.answer_timeout_s)

    @property
    def load(self) -> float:
        """Share of its concurrency that is used."""
        return self.num_open / self.config.max_concurrency

    def offers(self, request: ForwardedRequest) -> bool:
        """Whether it has the request's model on the request's route."""
        return request.model in self.config.models and request.route.name in self.config.routes

    async def check_health(self) -> None:
        """Request the list of models, and note whether the engine answers."""
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                answer = await self._links.send_request("GET", _HEALTH_PATH, (), b"")
            # the head alone: an engine's list can be long
            answer.close()
            is_healthy = answer.status == 200
        except (PeerLostError, TimeoutError):
            is_healthy = False
        if is_healthy != self.is_healthy:
            _log.warning("engine %s is %s", self.config.name, "back" if is_healthy else "not healthy")
        self.is_healthy = is_healthy

    async def send_request(self, request: ForwardedRequest) -> EngineReply:
        """Send a request and return the answer when its head has arrived."""
        payload = {**request.payload, "model": self.config.models[request.model]}
        if self.config.prefix_cache in {"isolated", "salted"}:
            payload["cache_salt"] = digest_hex(in_domain("cache-salt/1", self._salt), request.owner.encode())
        if self.config.prefix_cache in {"isolated", "off"}:
            payload["cache_prompt"] = False
        headers = _PROTOCOL_HEADERS.get(request.route.name, (_JSON,))
        # headers that come one by one, or provisional answers without end, are never silent for long
        async with asyncio.timeout(self._max_answer_s):
            return await self._links.send_request("POST", request.route.path, headers, canonical_json(payload))

    def close(self) -> None:
        """Close the connections that are idle; the others end with their answers."""
        self._links.close()


class BackendPool:
    """All engines of a gateway."""

    def __init__(self, backends: list[RemoteEngine]) -> None:
        self.backends = backends

    def model_names(self) -> list[str]:
        """Return the names of models that clients may use, sorted."""
        return sorted({name for backend in self.backends for name in backend.config.models})

    @asynccontextmanager
    async def open_answer(self, request: ForwardedRequest) -> AsyncIterator[tuple[RemoteEngine, EngineReply]]:
        """Send a request to the engine with the least load, and to the next one if that has certainly not begun.

        Each engine is tried once. A request that was sent and not answered may have been worked on, so it is not sent
        again.

        Raises:
            RequestRefused: No engine takes it.
        """
        backend, answer = await self._send_to_first(self._choose_backends(request), request)
        try:
            yield backend, answer
        finally:
            backend.num_open -= 1
            answer.close()

    async def watch_health(self, every_s: float) -> None:
        """Check each engine every `every_s` seconds until cancelled."""
        while True:
            await asyncio.gather(*(backend.check_health() for backend in self.backends))
            await asyncio.sleep(every_s)

    def close(self) -> None:
        """Close the connections that are idle."""
        for backend in self.backends:
            backend.close()

    def _choose_backends(self, request: ForwardedRequest) -> list[RemoteEngine]:
        offers = [backend for backend in self.backends if backend.offers(request)]
        if not offers:
            raise RequestRefused(404, "model_not_found", "There is no such model on this route.", param="model")
        if request.is_sensitive:
            offers = [backend for backend in offers if backend.config.local]
            if not offers:
                message = "The text holds personal data, which goes to local engines alone; none has this model."
                raise RequestRefused(403, "sensitive_text", message)
        ready = [
            backend for backend in offers if backend.is_healthy and backend.num_open < backend.config.max_concurrency
        ]
        return sorted(ready, key=lambda backend: backend.load)

    async def _send_to_first(
        self, candidates: list[RemoteEngine], request: ForwardedRequest
    ) -> tuple[RemoteEngine, EngineReply]:
        for backend in candidates:
            answer = await self._try_backend(backend, request)
            if answer is not None:
                return backend, answer
        raise RequestRefused(503, "no_engine", "No engine is free at present.", retry_after_s=_RETRY_AFTER_S)

    async def _try_backend(self, backend: RemoteEngine, request: ForwardedRequest) -> EngineReply | None:
        """Return the answer of an engine, which is then counted as at work; None where it has surely not begun."""
        if backend.num_open >= backend.config.max_concurrency:
            return None
        backend.num_open += 1
        answer = None
        try:
            answer = await backend.send_request(request)
            if answer.status in _BUSY_STATUSES:
                answer.close()
                answer = None
        except PeerGoneError:
            backend.is_healthy = False
        except (PeerLostError, TimeoutError) as exc:
            # no sign of health: what one client asks for must not take the engine from all others
            raise RequestRefused(502, "engine_failed", "The engine did not answer.") from exc
        finally:
            if answer is None:
                backend.num_open -= 1
        return answer


def _tls(config: BackendConfig) -> ssl.SSLContext:
    if config.authority is None:
        return httpx2.create_ssl_context(trust_env=False)
    try:
        return ssl.create_default_context(cafile=str(config.authority))
    except (OSError, ssl.SSLError) as exc:
        raise ConfigError(f"backends: {config.name}: {config.authority}: is no readable certificate") from exc
