"""A watched server of a tiny model, in a thread, on a loopback port."""

import sys
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest

from phalanx.serve.observe import Gauge, ServerWatch, WatchConfig, WatchedServer
from tiny_served import NO_FILTERS, add_key, running_server, serve_model, write_model

sys.path.append(str(Path(__file__).parent))


def watch_of(access, config, **more):
    """What makes the watch of a server."""

    def make(request_log, pool):
        running = Gauge("phalanx_running_requests", "Texts.", ("engine",), lambda: {("tiny",): 0.0})
        server = WatchedServer(
            access,
            lambda: {card.digest: card.id for card in pool.cards},
            lambda: {card.id: card.digest for card in pool.cards},
            (running,),
            **more,
        )
        return ServerWatch(config, server, request_log)

    return make


@pytest.fixture(scope="package")
def model_directory(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="package")
def watched(tmp_path_factory, model_directory):
    """Its address, and secrets by role."""
    access = tmp_path_factory.mktemp("watched") / "access"
    user_id, user = add_key(access)
    operator = add_key(access, "ops", role="operator")[1]
    filters = NO_FILTERS.model_copy(
        update={"input": NO_FILTERS.input.model_copy(update={"instructions": "note", "special_tokens": "refuse"})}
    )
    make = watch_of(access, WatchConfig())
    with running_server([serve_model(model_directory)], access, filters=filters, make_watch=make) as (url, pool):
        yield SimpleNamespace(url=url, pool=pool, user=user, user_id=user_id, operator=operator, access=access)


def http_of(url, secret=None):
    headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
    return httpx2.Client(base_url=url, headers=headers, timeout=250, trust_env=False, verify=False)


def read_samples(url, secret):
    """Each series with its value."""
    with http_of(url, secret) as http:
        answer = http.get("/metrics")
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
