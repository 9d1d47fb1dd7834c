"""Which model configs are accepted."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from phalanx.models import LoraConfig, ModelConfig


@pytest.mark.parametrize(
    "fields",
    [
        {"path": "some/model"},
        {"name": "smollm2-135m"},
        {"path": "some/model", "from_scratch": True},
        {"architecture": {"model_type": "gpt2", "n_layer": 2}, "from_scratch": True},
    ],
)
def test_each_origin_alone_is_accepted(fields):
    config = ModelConfig(**fields, adapter=LoraConfig())

    assert config.attention == "sdpa"
    assert config.adapter.alpha == 16.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "found none of path, name, architecture"),
        ({"path": "a", "name": "smollm2-135m"}, "found path and name"),
        ({"path": ""}, "path: is empty"),
        ({"name": "gpt5"}, "name: found 'gpt5'; choices: smollm2-135m"),
        ({"name": "smollm2-135m", "from_scratch": True}, "a packaged model has weights"),
        ({"architecture": {"model_type": "gpt2"}}, "set from_scratch = true"),
        ({"architecture": {"n_layer": 2}, "from_scratch": True}, "model_type is missing"),
        ({"path": "a", "attention": "flash"}, "attention"),
        ({"path": "a", "adapter": {"rank": 0}}, "rank"),
        ({"path": "a", "adapter": {"alpha": float("nan")}}, "alpha"),
        ({"path": "a", "adapter": {"dropout": 1.0}}, "dropout"),
        ({"path": "a", "adapter": {"targets": ("q", "q")}}, "each once"),
        ({"path": "a", "pth": "b"}, "pth"),
    ],
)
def test_contradictions_are_refused_by_name(fields, message):
    with pytest.raises(ValidationError, match=message):
        ModelConfig(**fields)


def test_numbers_of_an_architecture_keep_their_type():
    values = {"model_type": "gpt2", "n_layer": 2, "resid_pdrop": 0.0, "use_cache": False, "n_inner": None}

    config = ModelConfig(architecture=values, from_scratch=True)

    assert [type(value) for value in config.architecture.values()] == [type(v) for v in values.values()]


def test_the_configs_and_the_partition_load_no_torch():
    code = (
        "import sys; from phalanx.models import ModelConfig, partition_layers; partition_layers(4, 2, None, 0, 0); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_can_be_imported():
    import phalanx.models

    names = re.findall(r"(\w+) as \1\b", Path(phalanx.models.__file__).read_text(encoding="utf-8"))
    assert len(names) > 30
    assert all(getattr(phalanx.models, name) is not None for name in names)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        phalanx.models.nothing  # noqa: B018
