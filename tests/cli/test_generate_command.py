"""``phalanx generate``: a model, a chat or a file of prompts, for people and for programs."""

import json

import pytest
import tokenizers
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.models import parse_hub_config
from phalanx.models.source import write_random_model

CONFIG = {"model_type": "gpt2", "vocab_size": 4, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
GREEDY = ["--temperature", "0", "--max-new-tokens", "3"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    cache = tmp_path_factory.mktemp("models")
    config = CONFIG | {"bos_token_id": 1, "eos_token_id": 1}
    found = write_random_model(parse_hub_config(config, "tiny"), 1, cache, None)
    words = {"<unk>": 0, "<end>": 1, "yes": 2, "no": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(found / "tokenizer.json"))
    (found / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": "yes no"})
    )
    return str(found)


def call(*arguments, said=None):
    return CliRunner().invoke(app, ["generate", *arguments], input=said)


def test_a_prompt_is_printed_with_what_follows_and_stdin_will_do(model):
    by_option = call(model, "--prompt", "yes", *GREEDY)
    by_stdin = call(model, *GREEDY, said="yes")

    assert by_option.exit_code == 0
    assert by_option.output.startswith("yes")
    assert by_stdin.output == by_option.output


def test_a_chat_goes_on_to_the_end_of_its_input(model):
    found = call(model, "--chat", *GREEDY, said="yes\n\nno\n")

    assert found.exit_code == 0
    assert len(found.output.splitlines()) == 2


def test_a_file_is_completed_line_by_line(model, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "yes"}\n{"prompt": "no yes"}\n')

    found = call(model, "--input", str(prompts), "--out", str(out), *GREEDY)

    assert found.exit_code == 0
    assert [json.loads(line)["prompt_tokens"] for line in out.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "yes", "--chat"], "exclude each other"),
        (["--input", "x.jsonl"], "belong together"),
        (["--prompt", "yes", "--top-p", "0"], "--top-p"),
        (["--prompt", "yes", "--device", "gpu"], 'device = "gpu": is no device of Phalanx'),
    ],
)
def test_what_does_not_go_together_is_refused(model, arguments, message):
    found = call(model, *arguments)

    assert message in str(found.exception)
