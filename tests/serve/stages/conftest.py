"""A tiny model of five layers, and the engine of one process that texts are compared with."""

import pytest
from stage_scene import ENGINE, LAYERS

from phalanx.serve.engine import BatchingEngine
from tiny_served import UNMARKED, serve_model, write_model


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="session")
def one_process(directory):
    engine = BatchingEngine(serve_model(directory), ENGINE, UNMARKED)
    yield engine
    engine.close()
