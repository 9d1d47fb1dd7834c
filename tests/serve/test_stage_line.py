"""A model in several processes writes what the whole one writes, token for token, and its processes end with it."""

import os
import signal

import pytest
import torch
from test_text_model import CONFIG, GREEDY, SEEDED, changed, directory  # noqa: F401 - a fixture

import phalanx
from phalanx.cli import run_command as command_line
from phalanx.errors import ModelError
from phalanx.models import ModelSource, parse_hub_config
from phalanx.models.source import write_random_model
from phalanx.serve import SamplingRule, TextModel
from phalanx.serve.stage_process import CachedStage

LLAMA = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def in_stages(directory):  # noqa: F811
    model = TextModel(directory, stages=2)
    yield model
    model.close()


@pytest.mark.parametrize("rule", [GREEDY, SEEDED, SamplingRule(max_new_tokens=5, top_k=3, repetition_penalty=1.3)])
def test_stages_write_what_the_whole_model_writes(directory, in_stages, rule):  # noqa: F811
    whole = TextModel(directory)
    assert len(in_stages.stage_processes) == 2

    for text in ("the owner", "holds both ends the owner"):
        assert in_stages.complete_prompt(in_stages.encode_prompt(text), rule) == whole.complete_prompt(
            whole.encode_prompt(text), rule
        )


OPT = {
    "model_type": "opt",
    "vocab_size": 61,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "word_embed_proj_dim": 32,
}
WINDOWED = LLAMA | {"sliding_window": 5, "pad_token_id": None}
FAMILIES = {
    "llama": LLAMA,
    "gpt2": CONFIG | {"n_layer": 4, "n_positions": 32},
    "bloom": CONFIG | {"n_layer": 4, "n_positions": 32},
    "opt": OPT,
    # all layers, or every second one, see four tokens back; a wide window is never full
    "mistral": WINDOWED,
    "mistral wide": WINDOWED | {"sliding_window": 20},
    "gemma2": WINDOWED | {"head_dim": 8},
    "cohere2": WINDOWED,
}


@pytest.mark.parametrize("begun", [6, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_with_the_stages_own_caches_are_those_of_the_whole_models_cache(tmp_path, name, begun):
    sizes = FAMILIES[name] | {"model_type": name.split()[0]}
    found = write_random_model(parse_hub_config(sizes, "tiny"), 1, tmp_path, None)
    model = TextModel._load_model(found, "cpu")
    stages = [CachedStage(ModelSource(found), index, 3) for index in range(3)]
    ids = torch.randint(0, 7, (1, 14), generator=torch.Generator().manual_seed(2))
    past = None

    # the last two tokens come at once, as those of a chat's next turn
    for begin, end in ((0, begun), *((n, n + 1) for n in range(begun, 12)), (12, 14)):
        with torch.no_grad():
            out = model(ids[:, begin:end], past_key_values=past, use_cache=True)
        past, x = out.past_key_values, ids[:, begin:end]
        for stage in stages:
            x = stage.extend_cache(x, begins=begin == 0)
        assert torch.equal(x, out.logits[:, -1:])


def test_more_stages_than_layers_and_other_devices_are_refused(directory, capsys):  # noqa: F811
    with pytest.raises(ModelError, match=r"--stages: found 3; .* has 2 layers; give 1 to 2"):
        TextModel(directory, stages=3)
    with pytest.raises(ModelError, match="stages run on the processor"):
        TextModel(directory, "cuda", stages=2)
    assert command_line(["generate", str(directory), "--prompt", "the", "--stages", "3", "--json"]) == 3
    assert "found 3" in capsys.readouterr().out


def test_damaged_weights_of_one_stage_are_said_with_its_number(directory, tmp_path):  # noqa: F811
    source = changed(directory, tmp_path)
    (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-40])

    with pytest.raises(ModelError):
        TextModel(source, stages=2)


@pytest.mark.slow
def test_a_call_in_python_writes_the_same_in_stages_and_leaves_no_process(directory, monkeypatch):  # noqa: F811
    opened, start = [], TextModel._start_stages
    monkeypatch.setattr(
        TextModel, "_start_stages", lambda self, *args: (start(self, *args), opened.extend(self.stage_processes))[0]
    )
    sampling = GREEDY.model_dump()

    found = phalanx.generate(directory, "the owner", sampling, stages=2)

    assert found == phalanx.generate(directory, "the owner", sampling)
    assert len(opened) == 2
    assert not any(map(is_alive, opened))


def test_a_stage_that_was_killed_is_named_and_the_others_end_with_it(in_stages):
    # the last test of these processes
    os.kill(in_stages.stage_processes[1], signal.SIGKILL)

    with pytest.raises(ModelError, match="stage 1 of the model: signal 9"):
        in_stages.complete_prompt(in_stages.encode_prompt("the owner"), GREEDY)
    assert not any(map(is_alive, in_stages.stage_processes))
