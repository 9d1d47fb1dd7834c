"""One server of a tiny model for all tests of this folder, in a thread, on a loopback port."""

from types import SimpleNamespace

import pytest

from phalanx.serve.engine import EngineSettings
from tiny_served import add_key, running_server, serve_model, write_model


@pytest.fixture(scope="package")
def server(tmp_path_factory):
    """Its address, its engines, its models' directory, and secrets by owner."""
    directory = write_model(tmp_path_factory.mktemp("models"))
    other = write_model(tmp_path_factory.mktemp("models"), seed=2)
    access = tmp_path_factory.mktemp("serve") / "access"
    secrets = {"alice": add_key(access)[1], "bob": add_key(access, "bob", models=("other",))[1]}
    models = [serve_model(directory), serve_model(other, "other")]
    settings = EngineSettings(default_max_tokens=16, max_cache_tokens=1 << 14)
    with running_server(models, access, engine=settings) as (url, pool):
        yield SimpleNamespace(url=url, pool=pool, directory=directory, secrets=secrets, access=access)
