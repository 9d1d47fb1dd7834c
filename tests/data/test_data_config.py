"""What a run file may say about its data."""

import subprocess
import sys

import pytest

from phalanx.config import load_config
from phalanx.data import BpeConfig, DataConfig, PythonManualConfig
from phalanx.data.sources import JsonlConfig
from phalanx.errors import ConfigError

GOOD = """
sequence_length = 128
sources = [{kind = "python_manual"}, {kind = "jsonl", path = "a.jsonl", field = "body"}]
tokenizer = {kind = "bpe", vocab_size = 512}
"""


def load(tmp_path, text):
    path = tmp_path / "data.toml"
    path.write_text(text)
    return load_config(path, DataConfig)


def test_a_data_section_is_read_from_toml(tmp_path):
    config = load(tmp_path, GOOD)

    assert isinstance(config.sources[0], PythonManualConfig)
    assert isinstance(config.sources[1], JsonlConfig)
    assert config.sources[1].field == "body"
    assert config.tokenizer == BpeConfig(vocab_size=512)
    assert config.validation_share == 0.05


@pytest.mark.parametrize(
    ("found", "wrong", "named"),
    [
        ('kind = "python_manual"', 'kind = "internet"', "internet"),
        ('field = "body"', 'feld = "body"', "feld"),
        ("vocab_size = 512", "vocab_size = 256", "vocab_size"),
        ("sequence_length = 128", "sequence_length = 1", "sequence_length"),
        ("sequence_length = 128", "sequence_length = 128\nvalidation_share = nan", "validation_share"),
        ("sequence_length = 128", "sequence_length = 128\nvalidation_share = 0.6", "validation_share"),
        ("sequence_length = 128", "sequence_length = 128\nmax_documents = 0", "max_documents"),
    ],
)
def test_a_wrong_data_section_is_one_error_that_names_the_key(tmp_path, found, wrong, named):
    with pytest.raises(ConfigError, match=named):
        load(tmp_path, GOOD.replace(found, wrong))


def test_a_run_without_sources_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="sources"):
        load(tmp_path, 'sequence_length = 8\nsources = []\ntokenizer = {kind = "bpe"}')


def test_the_configs_load_neither_torch_nor_tokenizers():
    code = (
        "import sys, phalanx.data.config, phalanx.optimizers.config, phalanx.data, phalanx.optimizers;"
        "sys.exit(bool({'torch', 'tokenizers', 'numpy'} & set(sys.modules)))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
