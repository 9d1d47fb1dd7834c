"""Runs on conversations by the command line: learned, shown, exported, talked to, killed and resumed."""

import json

import pytest
from real_runs import end_all, make_place
from test_crashes import kill_owner
from transformers import AutoTokenizer
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.data.chat.template import DEFAULT_TEMPLATES
from tiny_run_file import tiny_run_file

SOURCES = (
    'sources = [{ kind = "python_manual" }]\ntokenizer = { kind = "bpe", vocab_size = 300 }\nsequence_length = 16\n'
)
SECTIONS = """
[pipeline]
stages = 4
step_timeout_s = 60.0

[guard]
audit_rate = 0.25
keep_states = 0
step_audit_rate = 0.0
owner_audit_rate = 0.0
gradient_screen = false

[checkpoint]
every = 3
best = "validation"
journal = false
"""
TALKS = [
    {
        "messages": [
            {"role": "user", "content": f"{a}+{b}?"},
            {"role": "assistant", "content": str(a + b)},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": str(a + b)},
        ]
    }
    for a in range(8)
    for b in range(8)
]


def chat_place(path):
    """A place of which the run file names conversations."""
    place = make_place(path)
    (path / "talks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in TALKS))
    talks = f"conversations = {{ sources = [{{ path = {json.dumps(str(path / 'talks.jsonl'))} }}] }}\n"
    data = f'{talks}tokenizer = {{ kind = "bpe", vocab_size = 262 }}\nsequence_length = 64\nattention = "document"\n'
    text = tiny_run_file(SECTIONS, steps=12, validate_every=4).replace(SOURCES, data)
    text = text.replace("n_positions = 16", "n_positions = 64").replace("max_documents = 12\n", "")
    place.run_file.write_text(text.replace("seed = 3\n", "seed = 3\nneftune_alpha = 5.0\n"))
    return place


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The place and the summary of a finished run."""
    place = chat_place(tmp_path_factory.mktemp("chats"))
    yield place, place.finish()
    end_all(place)


def call(*words, said=None):
    found = CliRunner().invoke(app, [str(word) for word in words], input=said)
    assert found.exit_code == 0, found.output
    return found.output


@pytest.mark.slow
def test_held_out_answers_become_less_surprising_and_the_best_checkpoint_is_known(trained):
    _, summary = trained

    assert summary["validation_perplexity"] < summary["validation_perplexity_first"] / 3
    assert summary["best_checkpoint"]["step"] in (4, 8, 12)


@pytest.mark.slow
def test_an_export_talks_as_the_run_was_trained(trained, tmp_path):
    place, _ = trained
    call("checkpoint", "export", place.path / "run", tmp_path / "out")

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == DEFAULT_TEMPLATES["chatml"]
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|endoftext|>", "<|im_end|>"]
    words = ("--chat", "--temperature", "0", "--max-new-tokens", "8")
    from_run = call("generate", place.path / "run", *words, said="3+4?\nagain\n")
    assert from_run == call("generate", tmp_path / "out", *words, said="3+4?\nagain\n")
    assert len(from_run.splitlines()) == 2


@pytest.mark.slow
def test_a_sample_marks_what_is_learned_and_nothing_else(trained):
    place, _ = trained

    said = call("data", "sample", place.run_file, "--mask", "--count", "2")

    marked = [one.partition("⟧")[0] for one in said.split("⟦")[1:]]
    assert marked
    assert all(one.removesuffix("<|im_end|>").isdecimal() and one.endswith("<|im_end|>") for one in marked)
    assert "⟦" not in call("data", "sample", place.run_file, "--count", "2")


@pytest.mark.slow
def test_a_run_on_conversations_that_is_killed_goes_on_to_the_same_bits(trained, tmp_path):
    _, clean = trained
    place = chat_place(tmp_path)
    process = place.train()
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 7,'))
    kill_owner(place, process)

    summary = place.finish(resume=True)

    assert summary["resumed_from"] == 6
    for key in ("final_weights_digest", "loss_last", "validation_perplexity", "tokens", "status"):
        assert summary[key] == clean[key], key
    end_all(place)
