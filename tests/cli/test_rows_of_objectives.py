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


TEXTS = [{"text": f"the patient has a cough for {n} days", "label": "cold" if n % 2 else "flu"} for n in range(8)]
PARTIES = {
    "split": "[split]\ncut = 1\nclients = 2\nallow_insecure_sim = true\n",
    "federated": '[federated]\nsites = ["north", "south"]\n',
}


@pytest.mark.parametrize("section", PARTIES)
def test_labelled_texts_of_every_party_are_shown_with_their_class(tmp_path, monkeypatch, section):
    for name, lines in (("a", TEXTS[:3]), ("b", TEXTS[3:6]), ("held", TEXTS[6:7]), ("held2", TEXTS[7:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = 'labelled = {{ task = {{ classes = ["flu", "cold"], train = [{train}], test = [{test}] }} }}'
    data = task.format(train='"a.jsonl", "b.jsonl"', test='"held.jsonl", "held2.jsonl"')
    run = RUN.format(data=data, objective='"classification"', more=PARTIES[section])
    run = run.replace("validation_share = 0.0\n", "").replace(
        "microbatches = 1\nvalidate_every = 0", "microbatches = 2"
    )
    run = run.replace("[model.architecture]", "[model.adapter]\nrank = 2\n[model.architecture]", 1)
    run = run.replace('[pipeline]\nstages = 2\n[guard]\nmode = "off"\n', "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(run)

    found = CliRunner().invoke(app, ["data", "sample", "run.toml", "--mask", "--count", "10"])

    assert found.exit_code == 0, (found.output, found.exception)
    assert all(line["text"] in found.output for line in TEXTS[:6])
    assert not any(line["text"] in found.output for line in TEXTS[6:])
    assert sum(line.split()[:2] == ["class", "flu"] for line in found.output.splitlines()) == 3
    assert "\u27e6" not in found.output


def test_rows_of_masked_and_moved_text_are_shown_as_they_are_learned(tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    for number in range(6):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"the river {number} runs to the sea under bridges. " * 3)
    data = 'sources = [{ kind = "text", path = "texts" }]'
    monkeypatch.chdir(tmp_path)
    marks = ["<mask>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    shown = {}
    for name, objective in {
        "masked": '{ kind = "masked", mask_token = "<mask>" }',
        "middle": '{ kind = "fill_in_the_middle", rate = 1.0 }',
    }.items():
        run = RUN.format(data=data, objective=objective, more="")
        run = run.replace("vocab_size = 260 }", f"vocab_size = 270, special_tokens = {json.dumps(marks)} }}")
        (tmp_path / "run.toml").write_text(run)
        found = CliRunner().invoke(app, ["data", "sample", "run.toml", "--mask", "--count", "2"])
        assert found.exit_code == 0, (found.output, found.exception)
        shown[name] = found.output

    # what is masked stands in the marks, the rest around them; all of it is text of the documents
    assert 4 < shown["masked"].count("\u27e6") < 60
    assert "<mask>" not in shown["masked"]
    assert "<fim_suffix>" in shown["middle"]
