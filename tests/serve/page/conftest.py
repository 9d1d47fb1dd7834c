"""One server of a tiny model with the chat page, in a thread."""

from types import SimpleNamespace

import httpx2
import pytest

from tiny_served import add_key, running_server, serve_model, write_model


@pytest.fixture(scope="package")
def server(tmp_path_factory):
    directory = write_model(tmp_path_factory.mktemp("models"))
    access = tmp_path_factory.mktemp("serve") / "access"
    keys = {name: add_key(access, name, role=role) for name, role in [("alice", "user"), ("ops", "operator")]}
    with running_server([serve_model(directory, "harbour-model")], access) as (url, pool):
        yield SimpleNamespace(url=url, keys=keys, pool=pool, access=access)


@pytest.fixture(scope="package")
def http(server):
    with httpx2.Client(base_url=server.url, trust_env=False) as http:
        yield http
