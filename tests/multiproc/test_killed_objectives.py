"""An owner that is killed while it learns something other than the next token goes on with equal bits."""

import json

import pytest
from real_runs import TINY, end_all, make_place
from test_crashes import kill_owner

from phalanx.config.extras import has_bitsandbytes
from phalanx.telemetry import read_metrics

SOURCES = 'sources = [{ kind = "python_manual" }]'
PAIRS = 'preferences = { sources = [{ path = "PLACE/pairs.jsonl" }] }'
STEPS = 8
NEEDS_QUANT = pytest.mark.skipif(not has_bitsandbytes(), reason="needs the extra `quant`")


def learn_pairs(place):
    """DPO, of short pairs, with a reference that the killed run has stored."""
    rows = [{"prompt": f"{n}?", "chosen": f" yes {n % 7}", "rejected": f" no {n % 5}"} for n in range(40)]
    (place.path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = TINY.replace(SOURCES, PAIRS.replace("PLACE", str(place.path))).replace("max_documents = 12\n", "")
    run = run.replace("vocab_size = 300 }", "vocab_size = 262 }")
    return run.replace("[train]\n", '[train]\nobjective = "dpo"\n')


def learn_hidden_tokens(_place):
    """BERT's objective: its rows are made anew in each step."""
    run = TINY.replace("vocab_size = 300 }", 'vocab_size = 300, special_tokens = ["[MASK]"] }')
    return run.replace("[train]\n", '[train]\nobjective = "masked"\n')


def learn_scores(place):
    """A reward model, of the same pairs."""
    run = learn_pairs(place).replace('objective = "dpo"', 'objective = "reward"')
    return run.replace("[model]\n", '[model]\nhead = "score"\n', 1)


def learn_in_bytes(_place):
    """Next tokens, with moments of a byte a number; its matrices are large enough for that."""
    run = TINY.replace("n_embd = 32", "n_embd = 64")
    return run.replace("[optimizer]\n", '[optimizer]\nkind = "adamw8bit"\n')


def learned(place):
    lines = read_metrics(place.path / "run" / "metrics.jsonl")
    return [(line["step"], line["batch"], line["loss"], line["grad_norm"]) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("journal", ["true", "false"])
@pytest.mark.parametrize(
    "written", [learn_pairs, learn_hidden_tokens, learn_scores, pytest.param(learn_in_bytes, marks=NEEDS_QUANT)]
)
def test_a_killed_run_goes_on_with_equal_bits(tmp_path, written, journal):
    found = {}
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        place = make_place(tmp_path / name)
        place.run_file.write_text(written(place))
        if name == "killed":
            process = place.train(f"checkpoint.journal={journal}")
            place.wait_for(process, lambda place=place: place.has_line("metrics.jsonl", '"step": 4,'))
            kill_owner(place, process)
        summary = place.finish(f"checkpoint.journal={journal}", resume=name == "killed")
        found[name] = summary["final_weights_digest"], learned(place)
        end_all(place)

    assert summary["resumed_from"] >= 3
    assert len(found["whole"][1]) == STEPS
    assert found["killed"] == found["whole"]
