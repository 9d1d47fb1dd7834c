"""What attacks are tried on: this program's server, and its gateway before an engine with vLLM's routes or llama.cpp.

With ``PHALANX_ATTACK_RESULTS=FILE`` the counts of the large tests are written to a file.
"""

import json
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from access_keys import make_access

sys.path.append(str(Path(__file__).parents[1] / "gateway"))
sys.path.append(str(Path(__file__).parent))
from llama_engine import LlamaEngine, write_file
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
        return httpx2.Client(base_url=self.url, headers=headers, timeout=250, trust_env=False, **more)


_RECORDS: list[str] = []


@pytest.fixture(autouse=True)
def record_log():
    """Keep what is logged during one test of this folder: servers of other tests log in the same process."""
    _RECORDS.clear()
    handler = logging.Handler()
    handler.emit = lambda record: _RECORDS.append(handler.format(record))
    loggers = logging.getLogger(), logging.getLogger("uvicorn.error")
    for logger in loggers:
        logger.addHandler(handler)
    yield
    for logger in loggers:
        logger.removeHandler(handler)


@pytest.fixture(scope="package")
def own_target(tmp_path_factory):
    # torch is imported by those tests alone that run a model
    from phalanx.serve.engine import EngineSettings
    from tiny_served import add_key, running_server, serve_model, write_model

    folder = tmp_path_factory.mktemp("own")
    models = [serve_model(write_model(folder / "models")), serve_model(write_model(folder / "others", 2), "other")]
    access = folder / "access"
    secrets = add_key(access)[1], add_key(access, "bob", models=("other",))[1]
    settings = EngineSettings(default_max_tokens=16, max_cache_tokens=1 << 14)
    with running_server(models, access, engine=settings) as (url, _):
        yield Target("own", url, "tiny", *secrets, access, lambda: "\n".join(_RECORDS), lambda: 0)


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


@pytest.fixture(scope="package")
def llama_target(tmp_path_factory):
    pytest.importorskip("xllamacpp")
    folder = tmp_path_factory.mktemp("llama")
    keys = make_access(folder / "access")
    secrets = keys.make("alice", limits=WIDE)[1], keys.make("bob", limits=WIDE, models=("other",))[1]
    with LlamaEngine(write_file(folder)) as engine:
        (folder / "engine.key").touch(mode=0o600)
        (folder / "engine.key").write_text(engine.key)
        backend = {"name": "llama", "url": engine.url, "models": {"small": "x"}, "local": True}
        backend |= {"secret_file": "engine.key", "routes": ["chat", "completions", "embeddings"]}
        # a model of random weights writes what filters refuse
        outputs = dict.fromkeys(("terminal_controls", "hidden_characters", "secrets", "personal_data", "links"), "off")
        config = {"backends": [backend], "health_every_s": 3600, "filters": {"output": outputs}}
        gateway = RunningGateway(folder, keys, config)
        yield Target("llama", gateway.url, "small", *secrets, folder / "access", gateway.log_text, engine.count_tokens)
        assert gateway.stop() == 0


@pytest.fixture(scope="session")
def note_attack():
    """Add a row to the file of results."""
    rows = []

    def note(attack: str, **facts) -> None:
        rows.append({"attack": attack, **facts})

    yield note
    if "PHALANX_ATTACK_RESULTS" in os.environ and rows:
        path = Path(os.environ["PHALANX_ATTACK_RESULTS"])
        rows = [*(json.loads(path.read_text())["rows"] if path.exists() else ()), *rows]
        from phalanx.lab.bench.measure.machine import load_average, result_context

        command = "PHALANX_ATTACK_RESULTS=FILE python -m pytest tests/serve/attacks"
        head = {"name": "served-attacks", "command": command, **result_context(load_average())}
        path.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


@pytest.fixture(params=["own", "gateway", pytest.param("llama", marks=pytest.mark.slow)])
def target(request):
    return request.getfixturevalue(f"{request.param}_target")
