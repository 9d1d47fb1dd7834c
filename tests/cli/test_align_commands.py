"""``phalanx align`` from prompts to files, with a tiny model; mistakes end with a code."""

import json

import pytest
import tokenizers

from phalanx.cli import run_command
from phalanx.models import parse_hub_config
from phalanx.models.source import write_random_model

WORDS = ["<unk>", "<end>", "owner", "holds", "both", "ends", "A", "B"]
CONFIG = {
    "model_type": "gpt2",
    "vocab_size": 8,
    "n_positions": 96,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
PRINCIPLE = '[[principle]]\nname = "brief"\ncritique = "ends ?"\nrevise = "both"\nchoose = "holds ?"\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model of eight words, in the hub's layout."""
    found = write_random_model(parse_hub_config(CONFIG, "tiny"), 1, tmp_path_factory.mktemp("models"), None)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.add_special_tokens(["<unk>", "<end>"])
    words.save(str(found / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "unk_token": "<unk>"}
    (found / "tokenizer_config.json").write_text(json.dumps(told))
    (found / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    return str(found)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompts = [{"prompt": f"owner {word}", "harmful": word == "both"} for word in WORDS[3:6]]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
    (tmp_path / "principles.toml").write_text(PRINCIPLE)
    return tmp_path


MADE = ("--prompts", "prompts.jsonl", "--principles", "principles.toml", "--max-new-tokens", "4", "--batch", "2")


def told(capsys):
    return json.loads(capsys.readouterr().out)


def test_revisions_are_made_once_and_the_second_call_does_nothing(here, model, capsys):
    assert run_command(["align", "revise", model, *MADE, "--out", "talks.jsonl", "--json"]) == 0
    first = told(capsys)

    assert run_command(["align", "revise", model, *MADE, "--out", "talks.jsonl", "--json"]) == 0

    assert told(capsys) == first
    assert first["rows"] == len((here / "talks.jsonl").read_text().splitlines()) == 3
    assert first["made_of"] == json.loads((here / "talks.jsonl.lineage.json").read_text())["made_of"]
    assert run_command(["align", "revise", model, *MADE, "--out", "talks.jsonl", "--seed", "1"]) == 3
    assert "another value of seed" in capsys.readouterr().err


def test_rewards_choose_and_a_model_judges_its_own_answers(here, model, capsys):
    rewards = '[judge]\nkind = "rewards"\n[[judge.of]]\nkind = "lengths.py:length"\n'
    (here / "judge.toml").write_text(rewards)
    (here / "lengths.py").write_text("def length(prompt, text, record):\n    return len(text)\n")
    asked = ("--prompts", "prompts.jsonl", "--max-new-tokens", "6", "--temperature", "9", "--json")

    assert run_command(["align", "choose", model, *asked, "--judge", "judge.toml", "--out", "worth.jsonl"]) == 0
    found = told(capsys)
    own = run_command(["align", "choose", model, *asked, "--principles", "principles.toml", "--out", "own.jsonl"])

    rows = [json.loads(line) for line in (here / "worth.jsonl").read_text().splitlines()]
    assert found["rows"] == len(rows) == 3 - sum(found["left_out"].values()) > 0
    assert all(len(row["chosen"]) - len(row["rejected"]) == row["margin"] > 0 for row in rows)
    # a random model may have no opinion of any pair, and then there is nothing to write
    judged = told(capsys)
    assert (own, "rows" in judged) in {(0, True), (3, False)}


def test_refusals_are_measured_and_fed_back(here, model, capsys):
    (here / "hook.py").write_text("def attack(ask):\n    yield {'prompt': 'holds ' + ask('both')}\n")
    limits = ("--max-new-tokens", "4", "--violation", ".", "--json")

    assert (
        run_command(
            [
                "align",
                "safety",
                model,
                "--set",
                "prompts.jsonl",
                "--hook",
                "hook.py:attack",
                "--out",
                "o.jsonl",
                *limits,
            ]
        )
        == 0
    )
    found = told(capsys)
    assert run_command(["align", "feedback", "o.jsonl", "--out", "pairs.jsonl", "--answer", "owner", "--json"]) == 0

    assert (found["refusal_rate"]["of"], found["over_refusal_rate"]["of"]) == (2, 2)
    assert told(capsys)["rows"] == found["violation_rate"]["count"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("revise", "MODEL", *MADE[:2], "--principles", "none.toml", "--out", "o"), 2, "PHX-C003"),
        (("revise", "MODEL", *MADE[2:], "--prompts", "none.jsonl", "--out", "o"), 3, "PHX-I011"),
        (("revise", "prompts.jsonl", *MADE, "--out", "o"), 3, "PHX-I030"),
        (("choose", "MODEL", *MADE[:2], "--out", "o"), 2, "the judge is missing"),
        (("choose", "MODEL", *MADE, "--demonstrations", "--out", "o"), 2, "remove --principles"),
        (("choose", "MODEL", *MADE, "--principle", "kind", "--out", "o"), 2, "choices: brief"),
        (("safety", "MODEL", "--hook", "hook.py"), 2, "expected"),
        (("feedback", "prompts.jsonl", "--out", "o"), 3, 'field "refused"'),
        (("values", "principles.toml", "prompts.jsonl"), 3, 'field "chosen"'),
    ],
)
def test_a_mistake_ends_with_its_exit_code_and_says_what_is_wrong(here, model, capsys, words, code, said):
    assert run_command(["align", *(model if one == "MODEL" else one for one in words)]) == code

    assert said in " ".join(capsys.readouterr().err.split())
