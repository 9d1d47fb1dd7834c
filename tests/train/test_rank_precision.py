"""Precisions and models that ranks of a domain take, or refuse before a process starts."""

import pytest

from phalanx.errors import ConfigError
from phalanx.models import open_model
from phalanx.parallel.deepspeed import DeepSpeedConfig
from phalanx.security.privacy import PrivacyConfig
from phalanx.train import DomainRun, load_run
from phalanx.train.setup.layout import check_router_losses

MASTERS = "train.precision=bf16_weights"
MIXTURE = """
[model]
from_scratch = true
[model.architecture]
model_type = "qwen3_moe"
vocab_size = 300
hidden_size = 16
intermediate_size = 24
moe_intermediate_size = 12
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
num_experts = 4
num_experts_per_tok = 2
max_position_embeddings = 16
output_router_logits = true
[data]
sources = [{ kind = "python_manual" }]
tokenizer = { kind = "bpe", vocab_size = 300 }
sequence_length = 16
[train]
steps = 2
batch_size = 4
microbatches = 1
[optimizer]
lr = 1e-3
"""


@pytest.fixture
def read(tmp_path):
    def read_run(sections, *overrides):
        path = tmp_path / "run.toml"
        path.write_text(MIXTURE + sections)
        return load_run(path, overrides)

    return read_run


@pytest.mark.parametrize("zero", [2, 3])
def test_ranks_that_share_parameters_take_bf16_weights(read, zero):
    run = read(f"[parallel]\ndp = 2\nzero = {zero}\n", MASTERS)

    assert isinstance(run, DomainRun)
    assert run.train.precision == "bf16_weights"


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("dp = 2\n", "found zero = 0 and 2"),
        ("dp = 2\nzero = 1\n", "found zero = 1 and 2"),
        # one copy alone shares nothing
        ("dp = 2\nzero = 3\nmin_dp = 1\n", "found zero = 3 and 1"),
    ],
)
def test_copies_that_keep_all_parameters_are_refused_bf16_weights(read, layout, words):
    with pytest.raises(ConfigError, match=words):
        read(f"[parallel]\n{layout}", MASTERS)


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"deepspeed": DeepSpeedConfig()}, r"\[deepspeed\] adds no losses"),
        ({"privacy": PrivacyConfig(epsilon=8.0, delta=1e-3)}, r"\[privacy\] adds no losses"),
    ],
)
def test_losses_of_routers_are_refused_where_nothing_adds_them(read, tmp_path, section, named):
    run = read("[parallel]\ndp = 2\n").model_copy(update=section)
    source = open_model(run.model, tmp_path / "cache", run.train.seed)

    with pytest.raises(ConfigError, match=named):
        check_router_losses(run, source)


def test_ranks_without_such_a_section_take_them(read, tmp_path):
    run = read("[parallel]\ndp = 2\n")

    check_router_losses(run, open_model(run.model, tmp_path / "cache", run.train.seed))
