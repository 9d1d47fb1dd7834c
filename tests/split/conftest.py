import pytest
from split_scene import HIDDEN, LAYERS, SEQ, VOCAB

from phalanx.models import ModelConfig, open_model


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A GPT-2 of width 16 with random weights."""
    architecture = {
        "model_type": "gpt2",
        "n_layer": LAYERS,
        "n_embd": HIDDEN,
        "n_head": 2,
        "vocab_size": VOCAB,
        "n_positions": SEQ,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    config = ModelConfig(from_scratch=True, architecture=architecture)
    return open_model(config, tmp_path_factory.mktemp("models"), seed=11)
