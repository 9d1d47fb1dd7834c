"""A watched server of a tiny model, in a thread, on a loopback port."""

from types import SimpleNamespace

import pytest
from watched_server import watch_of

from phalanx.serve.observe import WatchConfig
from tiny_served import NO_FILTERS, add_key, running_server, serve_model, write_model


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
