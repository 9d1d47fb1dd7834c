"""An owner that is killed while it learns something other than the next token goes on with equal bits."""

import json

import pytest
from real_runs import TINY
from test_crashes import whole_and_killed

from phalanx.config.extras import has_bitsandbytes
from phalanx.objectives import OBJECTIVES
from phalanx.telemetry import read_metrics

SOURCES = 'sources = [{ kind = "python_manual" }]'
PAIRS = 'preferences = { sources = [{ path = "PLACE/pairs.jsonl" }] }'
STEPS = 24
"""So many that a test which has seen the fifth step ends the run before its last, on a busy machine too."""
BASE = TINY.replace("steps = 8\n", f"steps = {STEPS}\n")
NEEDS_QUANT = pytest.mark.skipif(not has_bitsandbytes(), reason="needs the extra `quant`")
TOKENS = ["[MASK]", *(f"<extra_id_{n}>" for n in range(8)), "<fim_prefix>", "<fim_middle>", "<fim_suffix>"]
SETTINGS = {"denoisers": '{ kind = "denoisers", tasks = [{ kind = "span_corruption" }, { kind = "prefix_lm" }] }'}
OF_PAIRS = [kind for kind, one in OBJECTIVES.items() if one.target == "pair"]
OF_REWRITTEN_ROWS = [kind for kind, one in OBJECTIVES.items() if one.rewriting is not None]
ELSEWHERE = {
    "causal_lm": "test_crashes.py",
    "weighted_causal_lm": "test_chat_runs.py",
    "classification": "test_split_classification_runs.py",
    "grpo": "test_rollout_runs.py",
    "dr_grpo": "test_rollout_runs.py",
    "rloo": "test_rollout_runs.py",
    "ppo": "test_ppo_runs.py",
}
"""Where owners are killed that learn the others."""


def learn_pairs(kind, place):
    """A preference, of short pairs: with a reference that the killed run has stored, or a head that gives scores."""
    rows = [{"prompt": f"{n}?", "chosen": f" yes {n % 7}", "rejected": f" no {n % 5}"} for n in range(40)]
    (place.path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = BASE.replace(SOURCES, PAIRS.replace("PLACE", str(place.path))).replace("max_documents = 12\n", "")
    run = run.replace("vocab_size = 300 }", "vocab_size = 262 }")
    if OBJECTIVES[kind].head == "score":
        run = run.replace("[model]\n", '[model]\nhead = "score"\n', 1)
    return run.replace("[train]\n", f'[train]\nobjective = "{kind}"\n')


def learn_rows(kind, _place):
    """An objective of pre-training: its rows are made anew in each step."""
    run = BASE.replace("vocab_size = 300 }", f"vocab_size = 300, special_tokens = {json.dumps(TOKENS)} }}")
    return run.replace("[train]\n", f"[train]\nobjective = {SETTINGS.get(kind, json.dumps(kind))}\n")


def learn_in_bytes(_kind, _place):
    """Next tokens, with moments of a byte a number; its matrices are large enough for that."""
    run = BASE.replace("n_embd = 32", "n_embd = 64")
    return run.replace("[optimizer]\n", '[optimizer]\nkind = "adamw8bit"\n')


def learned(place):
    lines = read_metrics(place.path / "run" / "metrics.jsonl")
    return [(line["step"], line["batch"], line["loss"], line["grad_norm"]) for line in lines]


WRITTEN = dict.fromkeys(OF_PAIRS, learn_pairs) | dict.fromkeys(OF_REWRITTEN_ROWS, learn_rows)
JOURNALED = ("dpo", "masked", "reward")
"""With a journal as well: of stored numbers, of rows that are made anew, and with another head."""
CASES = [
    pytest.param(written, kind, journal, id=f"{kind}-{journal}")
    for kind, written in WRITTEN.items()
    for journal in (("true", "false") if kind in JOURNALED else ("false",))
] + [
    pytest.param(learn_in_bytes, "", journal, marks=NEEDS_QUANT, id=f"adamw8bit-{journal}")
    for journal in ("true", "false")
]


@pytest.mark.slow
@pytest.mark.parametrize(("written", "kind", "journal"), CASES)
def test_a_killed_run_goes_on_with_equal_bits(tmp_path, written, kind, journal):
    def prepare(place):
        place.run_file.write_text(written(kind, place))

    whole, killed = whole_and_killed(tmp_path, prepare, 4, learned, f"checkpoint.journal={journal}")

    assert len(whole[1]) == STEPS
    assert killed == whole


def test_every_objective_has_an_owner_that_is_killed():
    assert {*WRITTEN, *ELSEWHERE} == set(OBJECTIVES)
