"""The file of a gateway: where it listens, who is let in, and which engines stand behind it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from phalanx.config import StrictModel, load_config
from phalanx.serve.access.key_file import ModelName
from phalanx.serve.access.listener import ListenConfig, is_loopback
from phalanx.serve.access.request_bounds import RequestBounds
from phalanx.serve.filters import FiltersConfig
from phalanx.serve.observe import WatchConfig

RouteName = Literal["chat", "completions", "embeddings", "messages", "responses"]
_Seconds = Annotated[float, Field(gt=0, le=3600)]


class BackendConfig(StrictModel):
    """One engine that speaks the routes of OpenAI.

    Attributes:
        name: Name of the engine in messages and logs.
        url: Address without ``/v1``; plain HTTP is refused beyond this machine unless `unsafe_plain_http` says so.
        models: Name for clients to name at the engine.
        local: Personal data may go there.
        routes: Routes that the engine offers.
        secret_file: File, 0600, with the key that the engine wants.
        authority: Certificate of the authority that the engine's certificate must be of; PEM.
        prefix_cache: Whether keys of different owners may share the engine's cache of prompts, whose speed tells what
            others have asked: ``salted`` sends vLLM's and this server's ``cache_salt`` by owner, ``off`` sends
            llama.cpp's ``cache_prompt`` as false. ``isolated`` sends both, of which an engine reads what it knows.
        max_concurrency: Requests that the engine gets at the same time.
        answer_timeout_s: Longest silence within an answer.
    """

    name: ModelName
    url: Annotated[str, Field(max_length=300)]
    models: Annotated[dict[ModelName, ModelName], Field(min_length=1, max_length=100)]
    local: bool = False
    routes: tuple[RouteName, ...] = ("chat", "completions", "embeddings")
    secret_file: Path | None = None
    authority: Path | None = None
    prefix_cache: Literal["isolated", "salted", "off", "shared"] = "isolated"
    max_concurrency: Annotated[int, Field(ge=1, le=10_000)] = 64
    connect_timeout_s: _Seconds = 5
    answer_timeout_s: _Seconds = 120
    unsafe_plain_http: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        parts = urlsplit(self.url)
        if (
            parts.scheme not in {"http", "https"}
            or not parts.hostname
            or parts.username
            or parts.query
            or "\\" in self.url
        ):
            raise ValueError("url: expected such as http://127.0.0.1:8000, without user name, backslash or query")
        if parts.scheme == "http" and not is_loopback(parts.hostname) and not self.unsafe_plain_http:
            raise ValueError("url: plain HTTP to another machine lets others read texts on the way; use https")
        return self


class GatewayLimits(StrictModel):
    """Bounds on the wishes of a request.

    Attributes:
        max_completion_tokens: Tokens of one answer; a request that asks for more is refused.
        default_completion_tokens: Tokens of an answer to a request without a limit.
        max_choices: Number of answers to one prompt.
        max_answer_bytes: Length of one answer of an engine; a longer one is cut off.
        max_answer_s: Seconds of one answer of an engine, however often it sends something.
        allow_token_prompts: Take prompts as token ids, which no filter reads; they go to local engines alone.
        private_fields: Treatment of a request with fields that only one engine knows.
    """

    max_completion_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 8192
    default_completion_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    max_choices: Annotated[int, Field(ge=1, le=64)] = 4
    max_answer_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 16 * 1024 * 1024
    max_answer_s: Annotated[float, Field(gt=0, le=86_400)] = 3600
    allow_token_prompts: bool = False
    private_fields: Literal["refuse", "strip"] = "refuse"


class GatewayConfig(StrictModel):
    """The whole file.

    Attributes:
        access: Directory of keys, budgets and log.
        operator: Public key, in hex, that must have signed the keys; whatever ``operator.json`` says if None.
        seal_texts: Public half of the key for which texts of requests are sealed in the log; None logs none.
        health_every_s: Between two looks at each engine.
        drain_s: Seconds that answers may take to end when the gateway is stopped.
    """

    # read as JSON, where a path is text; the default is a path already
    access: Annotated[Path, Field(validate_default=False)] = Path("access")
    operator: Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")] | None = None
    seal_texts: Path | None = None
    listen: ListenConfig = ListenConfig()
    bounds: RequestBounds = RequestBounds()
    limits: GatewayLimits = GatewayLimits()
    filters: FiltersConfig = FiltersConfig()
    watch: WatchConfig = WatchConfig()
    backends: Annotated[tuple[BackendConfig, ...], Field(min_length=1, max_length=100)]
    health_every_s: _Seconds = 5
    drain_s: Annotated[int, Field(ge=0, le=3600)] = 30

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [backend.name for backend in self.backends]
        if len(set(names)) != len(names):
            raise ValueError("backends: two have the same name")
        return self


def load_gateway_config(path: Path, overrides: Iterable[str] = ()) -> GatewayConfig:
    """Read the file; relative paths in it are of its folder.

    Raises:
        ConfigError: Names the file, the key and the fault.
    """
    config = load_config(path, GatewayConfig, overrides)
    folder = path.parent
    listen = {
        name: _below(folder, getattr(config.listen, name))
        for name in ("certificate", "private_key", "client_authority")
    }
    backends = tuple(
        backend.model_copy(
            update={name: _below(folder, getattr(backend, name)) for name in ("secret_file", "authority")}
        )
        for backend in config.backends
    )
    update = {"access": folder / config.access, "listen": config.listen.model_copy(update=listen), "backends": backends}
    update |= {"watch": config.watch.below(folder), "seal_texts": _below(folder, config.seal_texts)}
    return config.model_copy(update=update)


def _below(folder: Path, path: Path | None) -> Path | None:
    return None if path is None else folder / path
