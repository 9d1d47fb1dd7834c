"""A run file that says nothing new has the digest that it had: its runs can be resumed, exported and proven."""

import json

from phalanx.config import digest_config
from phalanx.federated.config import FederatedConfig
from phalanx.train import PipelineRun

WRITTEN = {
    "model": {"from_scratch": True, "architecture": {"model_type": "gpt2", "n_layer": 4}},
    "data": {"sources": [{"kind": "python_manual"}], "tokenizer": {"kind": "bpe"}, "sequence_length": 16},
    "train": {"steps": 4, "batch_size": 8},
    "optimizer": {"lr": 0.001},
}
MADE_BEFORE = "71f4bc0777875dadd607182573febc2b6eb7b1b5c29b9d77837f469f7e775dd0"


def read(**train):
    written = WRITTEN | {"train": WRITTEN["train"] | train}
    return PipelineRun.model_validate_json(json.dumps(written))


def test_a_run_file_without_a_new_key_has_the_digest_that_it_had():
    assert digest_config(read()) == MADE_BEFORE


def test_a_new_key_of_a_run_file_is_in_its_digest():
    assert digest_config(read(histograms={})) != MADE_BEFORE
    assert digest_config(read(neftune_alpha=5.0)) != MADE_BEFORE


def test_a_federated_section_without_a_new_key_has_the_digest_that_it_had():
    written = {"sites": ["a", "b", "c"], "secure": True, "min_cohort": 3}

    def section(**more):
        return digest_config(FederatedConfig.model_validate_json(json.dumps(written | more)))

    assert section() == "a9d3491322167f56500ba9a39b227d5e05e69ec24889bba8ebe2eca7176235e2"
    assert section() == section(personal=[]) != section(personal=["score.*"])
    assert section() != section(privacy={"epsilon": 8.0, "delta": 1e-3}, max_norm=10.0)


def test_a_renamed_key_of_a_federated_section_leaves_its_digest():
    written = '{"sites": ["a", "b", "c"], "weights": "samples", "most_samples": 64, ' + (
        '"algorithm": {"kind": "fedbuff", "buffer": 2, "most_stale": 4}}'
    )

    for text in (written, written.replace("most_", "max_")):
        digest = digest_config(FederatedConfig.model_validate_json(text))
        assert digest == "cb5bf0f1d16ac03c7e87bd692daad9e70fbed8116df64ea631b1cd75750a9f2b"
