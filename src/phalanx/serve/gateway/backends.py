"""Engines behind a gateway: which one gets a request, and how it is sent so that nobody pays for it twice."""

import asyncio
import logging
import secrets
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2

from phalanx.config import canonical_json
from phalanx.errors import ConfigError
from phalanx.security.crypto import digest_hex, in_domain, read_private
from phalanx.serve.access.refusals import RequestRefused
from phalanx.serve.gateway.config import BackendConfig
from phalanx.serve.gateway.requests import ForwardedRequest

_log = logging.getLogger(__name__)
_HEALTH_PATH = "/v1/models"
_BUSY_STATUSES = frozenset({429, 503})
"""An engine that answers so has not begun to work."""
_RETRY_AFTER_S = 2
_PROTOCOL_HEADERS = {"messages": {"anthropic-version": "2023-06-01"}}
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
        headers = {"accept-encoding": "identity", "user-agent": "phalanx-gateway"}
        if config.secret_file is not None:
            secret = read_private(config.secret_file, "your provider gives it").decode("latin-1").strip()
            headers["authorization"] = f"Bearer {secret}"
        timeout = httpx2.Timeout(config.answer_timeout_s, connect=config.connect_timeout_s, pool=1)
        limits = httpx2.Limits(max_connections=config.max_concurrency + 1, max_keepalive_connections=64)
        # neither proxies nor keys out of the environment
        self._client = httpx2.AsyncClient(
            base_url=config.url, headers=headers, timeout=timeout, limits=limits, verify=_tls(config), trust_env=False
        )

    @property
    def load(self) -> float:
        """Share of its concurrency that is used."""
        return self.num_open / self.config.max_concurrency

    def offers(self, request: ForwardedRequest) -> bool:
        """Whether it has the request's model on the request's route."""
        return request.model in self.config.models and request.route.name in self.config.routes

    async def check_health(self) -> None:
        """Look whether it answers."""
        try:
            # the head alone: an engine's list can be long
            async with (
                asyncio.timeout(_HEALTH_TIMEOUT_S),
                self._client.stream("GET", _HEALTH_PATH, timeout=_HEALTH_TIMEOUT_S) as answer,
            ):
                is_healthy = answer.status_code == 200
        except (httpx2.HTTPError, TimeoutError):
            is_healthy = False
        if is_healthy != self.is_healthy:
            _log.warning("engine %s is %s", self.config.name, "back" if is_healthy else "not healthy")
        self.is_healthy = is_healthy

    async def send_request(self, request: ForwardedRequest) -> httpx2.Response:
        """Send a request and return the answer when its head has arrived."""
        payload = {**request.payload, "model": self.config.models[request.model]}
        if self.config.prefix_cache in {"isolated", "salted"}:
            payload["cache_salt"] = digest_hex(in_domain("cache-salt/1", self._salt), request.owner.encode())
        if self.config.prefix_cache in {"isolated", "off"}:
            payload["cache_prompt"] = False
        headers = {"content-type": "application/json", **_PROTOCOL_HEADERS.get(request.route.name, {})}
        message = self._client.build_request(
            "POST", request.route.path, content=canonical_json(payload), headers=headers
        )
        # headers that come one by one, or provisional answers without end, are never silent for long
        async with asyncio.timeout(self._max_answer_s):
            return await self._client.send(message, stream=True)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()


class BackendPool:
    """All engines of a gateway."""

    def __init__(self, backends: list[RemoteEngine]) -> None:
        self.backends = backends

    def model_names(self) -> list[str]:
        """Return the names of models that clients may use, sorted."""
        return sorted({name for backend in self.backends for name in backend.config.models})

    @asynccontextmanager
    async def open_answer(self, request: ForwardedRequest) -> AsyncIterator[tuple[RemoteEngine, httpx2.Response]]:
        """Send a request to the engine with the least load, and to the next one where that has surely not begun.

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
            await answer.aclose()

    async def watch_health(self, every_s: float) -> None:
        """Look at each engine again and again, until it is cancelled."""
        while True:
            await asyncio.gather(*(backend.check_health() for backend in self.backends))
            await asyncio.sleep(every_s)

    async def close(self) -> None:
        """Close all connections."""
        for backend in self.backends:
            await backend.close()

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
    ) -> tuple[RemoteEngine, httpx2.Response]:
        for backend in candidates:
            answer = await self._try_backend(backend, request)
            if answer is not None:
                return backend, answer
        raise RequestRefused(503, "no_engine", "No engine is free at present.", retry_after_s=_RETRY_AFTER_S)

    async def _try_backend(self, backend: RemoteEngine, request: ForwardedRequest) -> httpx2.Response | None:
        """Return the answer of an engine, which is then counted as at work; None where it has surely not begun."""
        backend.num_open += 1
        answer = None
        try:
            answer = await backend.send_request(request)
            if answer.status_code in _BUSY_STATUSES:
                await answer.aclose()
                answer = None
        except (httpx2.ConnectError, httpx2.ConnectTimeout):
            backend.is_healthy = False
        except httpx2.PoolTimeout:
            pass
        except (httpx2.HTTPError, TimeoutError) as exc:
            # no sign of health: what one client asks for must not take the engine from all others
            raise RequestRefused(502, "engine_failed", "The engine did not answer.") from exc
        finally:
            if answer is None:
                backend.num_open -= 1
        return answer


def _tls(config: BackendConfig) -> ssl.SSLContext | bool:
    if config.authority is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(config.authority))
    except (OSError, ssl.SSLError) as exc:
        raise ConfigError(f"backends: {config.name}: {config.authority}: is no readable certificate") from exc
