"""``phalanx data sample RUN --mask``: the rows of every objective before training, with what is learned of each."""

import json

import pytest
from typer.testing import CliRunner

from phalanx.cli.app import app

RUN = """
[model]
from_scratch = true
[model.architecture]
model_type = "gpt2"
vocab_size = 300
n_positions = 64
n_embd = 8
n_layer = 2
n_head = 1
bos_token_id = 0
eos_token_id = 0
[data]
{data}
tokenizer = {{ kind = "bpe", vocab_size = 260 }}
sequence_length = 64
validation_share = 0.0
[train]
steps = 1
batch_size = 2
microbatches = 1
validate_every = 0
objective = {objective}
[optimizer]
lr = 1e-3
[pipeline]
stages = 2
[guard]
mode = "off"
{more}
"""
PREFERENCES = '{{ sources = [{{ path = "rows.jsonl", shape = "{shape}" }}], template = "plain" }}'
PAIRS = [{"prompt": f"question {n}?", "chosen": f" yes {n}", "rejected": f" no {n}", "margin": 2.0} for n in range(4)]
LABELLED = [{"prompt": f"question {n}?", "completion": f" yes {n}", "label": n > 1} for n in range(4)]
PROMPTS = [{"prompt": f"question {n}?"} for n in range(4)]
REWARDS = '[[rewards.of]]\nkind = "pattern"\npattern = "yes"\n'


def sampled(tmp_path, monkeypatch, lines, data, objective, more=""):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "run.toml").write_text(RUN.format(data=data, objective=objective, more=more))
    found = CliRunner().invoke(app, ["data", "sample", "run.toml", "--mask", "--count", "4"])
    assert found.exit_code == 0, (found.output, found.exception)
    return found.output


@pytest.mark.parametrize("objective", ['{ kind = "dpo", beta = 0.1 }', '{ kind = "reward" }'])
def test_both_sides_of_a_pair_are_shown_with_the_answer_marked(tmp_path, monkeypatch, objective):
    data = f"preferences = {PREFERENCES.format(shape='pairs')}"

    said = sampled(tmp_path, monkeypatch, PAIRS, data, objective)

    for number in range(4):
        for answer in ("yes", "no"):
            assert f"question {number}?\u27e6 {answer} {number}" in said
    assert said.count("chosen") == said.count("rejected") == 4
    assert "margin" in said


def test_an_example_and_its_companion_are_shown_with_whether_it_is_wanted(tmp_path, monkeypatch):
    data = f"preferences = {PREFERENCES.format(shape='labelled')}"

    said = sampled(tmp_path, monkeypatch, LABELLED, data, '{ kind = "kto", beta = 0.1 }')

    assert said.count("example") == said.count("companion") == 4
    assert said.count("True") == said.count("False") == 4


def test_prompts_are_shown_of_which_nothing_is_learned(tmp_path, monkeypatch):
    objective = '{ kind = "grpo", group = 2, max_new_tokens = 8 }'

    said = sampled(tmp_path, monkeypatch, PROMPTS, 'prompts = ["rows.jsonl"]', objective, REWARDS)

    assert all(f"question {number}?" in said for number in range(4))
    assert "\u27e6" not in said
