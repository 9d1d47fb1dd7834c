"""The file of a gateway: where it listens, who is let in, and which engines stand behind it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from phalanx.config import StrictModel, load_config
from phalanx.serve.access.key_file import ModelName
from phalanx.serve.access.listener import ListenConfig, is_loopback
from phalanx.serve.access.request_bounds import RequestBounds
from phalanx.serve.filters import FiltersConfig

RouteName = Literal["chat", "completions", "embeddings", "messages"]
_Seconds = Annotated[float, Field(gt=0, le=3600)]
_Part = TypeVar("_Part", bound=StrictModel)


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
            others have asked: ``salted`` sends vLLM's ``cache_salt`` by owner, ``off`` sends llama.cpp's
            ``cache_prompt`` as false.
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
    prefix_cache: Literal["shared", "salted", "off"] = "shared"
    max_concurrency: Annotated[int, Field(ge=1, le=10_000)] = 64
    connect_timeout_s: _Seconds = 5
    answer_timeout_s: _Seconds = 120
    unsafe_plain_http: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        parts = urlsplit(self.url)
        has_more = parts.username or parts.query or "\\" in self.url
        if parts.scheme not in {"http", "https"} or not parts.hostname or has_more:
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
        allow_token_prompts: Take prompts as token ids, which no filter reads; they go to local engines alone.
        private_fields: Treatment of a request with fields that only one engine knows.
    """

    max_completion_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 8192
    default_completion_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    max_choices: Annotated[int, Field(ge=1, le=64)] = 4
    max_answer_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 16 * 1024 * 1024
    allow_token_prompts: bool = False
    private_fields: Literal["refuse", "strip"] = "refuse"


class GatewayConfig(StrictModel):
    """The whole file.

    Attributes:
        access: Directory of keys, budgets and log.
        operator: Public key, in hex, that must have signed the keys; whatever ``operator.json`` says if None.
        health_every_s: Between two looks at each engine.
        drain_s: Seconds that answers may take to end when the gateway is stopped.
    """

    # read as JSON, where a path is text; the default is a path already
    access: Annotated[Path, Field(validate_default=False)] = Path("access")
    operator: Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")] | None = None
    listen: ListenConfig = ListenConfig()
    bounds: RequestBounds = RequestBounds()
    limits: GatewayLimits = GatewayLimits()
    filters: FiltersConfig = FiltersConfig()
    backends: Annotated[tuple[BackendConfig, ...], Field(min_length=1, max_length=100)]
    health_every_s: _Seconds = 5
    drain_s: Annotated[int, Field(ge=0, le=3600)] = 30

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({backend.name for backend in self.backends}) != len(self.backends):
            raise ValueError("backends: two have the same name")
        return self


def load_gateway_config(path: Path, overrides: Iterable[str] = ()) -> GatewayConfig:
    """Read the file; relative paths in it are of its folder.

    Raises:
        ConfigError: Names the file, the key and the fault.
    """
    config = load_config(path, GatewayConfig, overrides)
    listen = _below(path.parent, config.listen, "certificate", "private_key", "client_authority")
    backends = tuple(_below(path.parent, backend, "secret_file", "authority") for backend in config.backends)
    return _below(path.parent, config, "access").model_copy(update={"listen": listen, "backends": backends})


def _below(folder: Path, part: _Part, *names: str) -> _Part:
    """Return a part of the file with the paths of these names, where they are set, below a folder."""
    paths = {name: getattr(part, name) for name in names}
    return part.model_copy(update={name: folder / path for name, path in paths.items() if path is not None})
