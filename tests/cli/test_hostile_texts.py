"""Texts of models, documents and peers on a terminal: none of them reaches it as an order.

The attacker trained a model that is tried, wrote a document of a corpus, or sent what a command quotes; it wants
the clipboard (OSC 52), the window's title (OSC 0), the cursor (CSI), or lines that turn their direction.
"""

import json
import re

import pytest
import tokenizers
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.cli.console import print_error, print_figures, print_line, print_rows
from phalanx.cli.data.sample import _print_pieces as say_row
from phalanx.config import escape_controls
from phalanx.data.row_text import RowPiece
from phalanx.models import parse_hub_config
from phalanx.models.source import write_random_model

HOSTILE = {
    "clipboard": "\x1b]52;c;cm0gLXJmIH4K\x07",
    "title": "\x1b]0;root\x1b\\",
    "cursor": "\x1b[2A\x1b[2K",
    "eight bits": "\x9b2J\x9d0;root\x9c",
    "device": "\x1bP+q544e\x1b\\",
    "back over the line": "verdict  guilty\rverdict  fine  ",
    "deletes": "guilty\b\b\b\b\b\bfine",
    "direction": "\u202egnihton\u2066",
    "line separator": "a\u2028b\x85c\x0bd",
}
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
CONFIG = {"model_type": "gpt2", "vocab_size": 12, "n_positions": 32, "n_embd": 8, "n_layer": 1, "n_head": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of which every word but the last is an order to a terminal."""
    found = write_random_model(
        parse_hub_config(CONFIG | {"bos_token_id": 11, "eos_token_id": 11}, "tiny"),
        1,
        tmp_path_factory.mktemp("m"),
        None,
    )
    words = {word: number for number, word in enumerate([*HOSTILE.values(), "yes", "no", "<end>"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="yes"))
    tokenizer.save(str(found / "tokenizer.json"))
    (found / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": "yes"})
    )
    return str(found)


def generate(*arguments, said=None):
    found = CliRunner().invoke(app, ["generate", *arguments, "--max-new-tokens", "16", "--seed", "3"], input=said)
    assert found.exit_code == 0, found.output
    return found.output


@pytest.mark.parametrize("way", [["--prompt", "yes"], ["--chat"], []], ids=["prompt", "chat", "stdin"])
def test_nothing_that_a_model_writes_steers_the_terminal(model, way):
    output = generate(model, *way, "--temperature", "2", said="yes\n")

    assert not STEERS.search(output)
    assert "\\x1b" in output or "\\x9b" in output or "\\u202e" in output


@pytest.mark.parametrize("order", HOSTILE.values(), ids=HOSTILE)
def test_nothing_in_a_prompt_steers_it_either(model, order):
    assert not STEERS.search(generate(model, said=order))


@pytest.mark.parametrize("order", HOSTILE.values(), ids=HOSTILE)
def test_no_row_of_a_corpus_and_no_figure_steers_it(capsys, order):
    say_row([RowPiece(order, 3, True, 0), RowPiece(f"{order}x" * 300, 3, False, 1)], mask=True)
    print_figures({f"  {order}": order, "party": [order]})
    print_rows([{order: order, "[red]x": {"a": order}}])
    print_line(order)
    print_error(order)

    said = capsys.readouterr()

    # the colour of what is learned is the command's own
    assert not STEERS.search(re.sub(r"\x1b\[[0-9;]*m", "", said.out) + re.sub(r"\x1b\[[0-9;]*m", "", said.err))
    assert "[red]x" in said.out
    assert said.out.count("x") >= 300


def test_a_value_of_several_lines_does_not_look_like_another_figure(capsys):
    print_figures({"guilty": "worker-1\nguilty  nobody", "stage": 1})

    lines = capsys.readouterr().out.splitlines()

    assert [line for line in lines if line.startswith("guilty")] == ["guilty  worker-1"]


def test_writing_that_people_use_is_shown_as_it_is():
    text = (
        "caf\u00e9\n\t\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \U0001f468\u200d\U0001f469 \u4e2d\u6587 e\u0301"
    )

    assert escape_controls(text) == text
    assert escape_controls("a\x1b[0m\r\n") == "a\\x1b[0m\\r\n"
