"""A reward model a value, of ranked principles and of demonstrations; the weights of a run file decide a conflict."""

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from align.fake_writer import BiasedJudge, FakeWriter
from phalanx.align import PairChoice, read_prompts, value_gaps
from phalanx.align.choice import by_principles, chosen_figures
from phalanx.align.principles import Constitution
from phalanx.align.values import read_pairs
from phalanx.cli.app import app
from phalanx.rewards import RewardScorer
from phalanx.train import load_run, train

RUN = """
[model]
from_scratch = true
head = "score"

[model.architecture]
model_type = "llama"
vocab_size = 320
num_hidden_layers = 2
hidden_size = 32
intermediate_size = 64
num_attention_heads = 4
num_key_value_heads = 4
max_position_embeddings = 64
bos_token_id = 0
eos_token_id = 0

[data]
preferences = {{ sources = [{{ path = "{pairs}" }}], template = "chatml" }}
tokenizer = {{ kind = "bpe", vocab_size = 300, special_tokens = ["<|im_start|>", "<|im_end|>"] }}
sequence_length = 48
validation_share = 0.25

[train]
steps = 40
batch_size = 32
microbatches = 2
validate_every = 40
objective = "reward"

[optimizer]
lr = 3e-3
warmup_steps = 4

# the owner alone: no worker processes
[pipeline]
stages = 2
"""
RANKED = {
    "principle": [
        # the first that is no tie decides
        {"name": "known", "choose": "which says it knows?"},
        {"name": "brief", "choose": "which is shorter?"},
    ]
}
NUMBERS = range(64)


def sides(question):
    """The answers that a judge is shown."""
    first, _, second = question.partition("(A) ")[2].partition("\n\n(B) ")
    return first, second.partition("\n\n")[0]


def likes(question):
    """A judge without an opinion on what is known; of two answers it likes the shorter one."""
    one, other = sides(question)
    return 0.5 if "knows" in question else float(len(one) < len(other))


def made_pairs(home, value):
    """Pairs by which a value is learned: of a judge and ranked principles, or of demonstrations."""
    lines = [{"prompt": f"count {n}", "demonstration": f"please take {n}"} for n in NUMBERS]
    (home / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = read_prompts(home / "prompts.jsonl")
    if value == "polite":
        writer, choose = FakeWriter(lambda chat, _: chat[0].content[6:]), None
    else:
        # of two answers one is polite, and long
        writer = FakeWriter(lambda chat, seed: ("please take " if seed % 2 else "") + chat[0].content[6:])
        judge = BiasedJudge(likes)
        choose = by_principles(judge, Constitution.model_validate_json(json.dumps(RANKED)), 0, ranked=True)
    rows = [row for n in NUMBERS for row in PairChoice(writer, choose, asked, 3, {}).make_rows(range(n, n + 1))]
    kept, figures = chosen_figures(rows)
    path = home / f"{value}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    return path, figures


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A directory with a reward model of each value, beside the pairs that it was learned of."""
    home = tmp_path_factory.mktemp("values")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_CACHE", str(home / "cache"))
        for value in ("polite", "brief"):
            pairs, figures = made_pairs(home, value)
            assert figures["principles"] in ({}, {"brief": figures["prompts"] - sum(figures["left_out"].values())})
            (home / f"{value}.toml").write_text(RUN.format(pairs=pairs))
            summary = train(
                load_run(home / f"{value}.toml"), home / f"run-{value}", console=Console(file=io.StringIO(), width=200)
            )
            assert summary["preferences"]["accuracy"] > 0.9
            found = CliRunner().invoke(app, ["checkpoint", "export", str(home / f"run-{value}"), str(home / value)])
            assert found.exit_code == 0, found.output
    return home


def values_of(home, weights):
    """A run file that learns from both, with these weights."""
    rewards = "".join(
        f'\n[[rewards.of]]\nkind = "model"\nname = "{value}"\npath = "{home / value}"\nweight = {weight}\n'
        for value, weight in weights.items()
    )
    path = home / f"values-{'-'.join(map(str, weights.values()))}.toml"
    tokenizer = home / "polite" / "tokenizer.json"
    text = RUN.format(pairs="x").replace('head = "score"\n', "")
    data = f'prompts = "{home / "prompts.jsonl"}"\ntokenizer = {{ kind = "file", path = "{tokenizer}" }}\n'
    begin, end = text.index("preferences ="), text.index("sequence_length")
    text = text[:begin] + data + text[end:]
    path.write_text(text.replace('objective = "reward"', 'objective = { kind = "grpo", max_new_tokens = 8 }') + rewards)
    return path


def shown(home, weights, pairs):
    """What `phalanx align values` shows."""
    rewards = load_run(values_of(home, weights)).rewards
    with RewardScorer(rewards, home, home / "rewards.log") as values:
        return value_gaps(read_pairs(pairs), values, 0.0)


@pytest.mark.slow
def test_values_that_were_learned_apart_disagree_where_they_should_and_weights_decide(learned):
    polite = learned / "polite.jsonl"

    found = shown(learned, {"polite": 1.0, "brief": 0.0}, polite)

    # each holds to what it was taught, on the same answers
    assert found["accuracy"]["polite"] > 0.9
    assert found["accuracy"]["brief"] < 0.1
    assert found["disagreement"]["polite / brief"] > 0.8
    assert found["conflicts"][0]["gaps"]["polite"] > 0 > found["conflicts"][0]["gaps"]["brief"]
    assert found["conflicts"][0]["sum"] > 0
    other = shown(learned, {"polite": 0.0, "brief": 1.0}, polite)
    assert other["conflicts"][0]["sum"] < 0
