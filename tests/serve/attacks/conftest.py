"""What attacks are tried on: this program's server, and its gateway before an engine with vLLM's open routes."""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from access_keys import make_access

sys.path.append(str(Path(__file__).parents[1] / "gateway"))
sys.path.append(str(Path(__file__).parent))
from running_gateway import WIDE, RunningGateway, backends
from stub_engine import Stub


@dataclass
class Target:
    """A door that is attacked.

    Attributes:
        other_secret: Key of another owner, which may use the model ``other`` alone.
        read_log: All that the server has written beside its log of requests.
        num_forwarded: Requests that reached an engine behind it.
    """

    name: str
    url: str
    model: str
    secret: str
    other_secret: str
    access: Path
    read_log: object
    num_forwarded: object

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, secret: str | None = None, **more) -> httpx2.Client:
        headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False, **more)


@pytest.fixture(scope="package")
def own_target(tmp_path_factory):
    # torch is imported by those tests alone that run a model
    from phalanx.serve.engine import EngineSettings
    from tiny_served import add_key, running_server, serve_model, write_model

    folder = tmp_path_factory.mktemp("own")
    models = [serve_model(write_model(folder / "models")), serve_model(write_model(folder / "others", 2), "other")]
    access = folder / "access"
    secrets = add_key(access)[1], add_key(access, "bob", models=("other",))[1]
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(handler.format(record))
    logging.getLogger().addHandler(handler)
    logging.getLogger("uvicorn.error").addHandler(handler)
    settings = EngineSettings(default_max_tokens=16, max_cache_tokens=1 << 14)
    with running_server(models, access, engine=settings) as (url, _):
        yield Target("own", url, "tiny", *secrets, access, lambda: "\n".join(records), lambda: 0)
    logging.getLogger().removeHandler(handler)
    logging.getLogger("uvicorn.error").removeHandler(handler)


@pytest.fixture(scope="package")
def gateway_target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gateway")
    keys = make_access(folder / "access")
    secrets = keys.make("alice", limits=WIDE)[1], keys.make("bob", limits=WIDE, models=("other",))[1]
    with Stub() as local, Stub() as cloud:
        engines = backends(local, cloud)
        gateway = RunningGateway(folder, keys, {"backends": engines, "health_every_s": 3600})

        def num_forwarded() -> int:
            return sum(len(stub.requests) + len(stub.hits) for stub in (local, cloud))

        yield Target("gateway", gateway.url, "small", *secrets, folder / "access", gateway.log_text, num_forwarded)
        assert gateway.stop() == 0


@pytest.fixture(params=["own", "gateway"])
def target(request):
    return request.getfixturevalue(f"{request.param}_target")
