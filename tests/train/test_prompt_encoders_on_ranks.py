"""P-tuning on ranks: encoder and embeddings are those of one process, and are exported from the run as peft's."""

import json

import pytest
import torch
from safetensors.torch import load_file

from kept_states import assert_same_weights, kept_state
from phalanx.models import PromptEncoderConfig, encoded_prompt
from phalanx.telemetry import read_metrics
from phalanx.train import PastRun, export_run, load_run
from tiny_run_file import tiny_run_file

STEPS = 6
SGD = ("optimizer.kind='sgd'", "optimizer.lr=0.1", "optimizer.weight_decay=0.0")
ENCODER = '[model.adapter]\nkind = "prompt_encoder"\ntokens = 3\nencoder = "{}"\n'


@pytest.fixture
def learn(quietly, tmp_path):
    """Train on some ranks; losses, what is kept of the last step, and the run's directory."""

    def run(layout, encoder):
        file, directory = tmp_path / f"{layout}.toml", tmp_path / layout
        text = tiny_run_file(f"[parallel]\n{layout}\n[checkpoint]\nevery = {STEPS}\n")
        file.write_text(text + ENCODER.format(encoder))
        summary = quietly(load_run(file, ("data.sequence_length=12", *SGD)), directory)
        assert summary["status"] == "completed", summary["shown"]
        losses = [line["loss"] for line in read_metrics(directory / "metrics.jsonl")]
        return losses, kept_state(directory, STEPS), directory

    return run


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["mlp", pytest.param("lstm", marks=pytest.mark.slow)])
def test_ranks_train_encoder_and_embeddings_as_one_process_does(learn, encoder, tmp_path):
    losses, expected, _ = learn("dp = 1", encoder)

    found, weights, directory = learn("dp = 2", encoder)

    assert found == pytest.approx(losses, rel=1e-6)
    assert losses[-1] != losses[0]
    assert all(name.startswith("weight/prompt_encoder.") or "/prompt_encoder." in name for name in weights)
    assert_same_weights(weights, expected)
    export_run(PastRun(directory), tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["peft_type"] == "P_TUNING"
    trained = {name.removeprefix("weight/"): value for name, value in weights.items() if name.startswith("weight/")}
    made = encoded_prompt(trained, PromptEncoderConfig(kind="prompt_encoder", tokens=3, encoder=encoder))
    assert torch.equal(load_file(tmp_path / "adapter" / "adapter_model.safetensors")["prompt_embeddings"], made)
