"""docs/benchmarks.md, the section about data: its figures are the raw result's."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
FOUND = json.loads((ROOT / "benchmarks" / "results" / "data-cpu-2cores-busy.json").read_text(encoding="utf-8"))
ROWS = {row["rule"]: row for row in FOUND["rows"]}


def speeds(rule):
    ours, theirs = ROWS[rule]["mb_per_s_core"], ROWS[rule]["peer_mb_per_s_core"]
    return f"{ours:.2f} | {theirs:.2f} | {ours / theirs:.1f} |"


def test_the_speeds_of_the_chains_are_those_of_the_raw_result():
    assert f"| all rules, beside the peer's five | {speeds('chain')}\n" in PAGE
    assert f"| the five rules of both | {speeds('chain_of_both')}\n" in PAGE
    assert f"| whole build, text | {FOUND['whole_build']['text_mb_per_s_core']:.2f} | - | - |\n" in PAGE
    assert FOUND["disagreements"] == []
    assert sum(FOUND["bytes"].values()) >= 20_000_000


def test_what_is_lost_and_repeated_is_what_the_raw_result_says():
    order = FOUND["order"]

    for name, one in {"Phalanx": order, **order["peers"]}.items():
        assert f"| {name} | {one['lost']} | {one['repeated']} | {one['refused']} |\n" in PAGE
    assert (order["lost"], order["repeated"], order["refused"]) == (0, 0, 0)


def test_verified_reading_is_far_ahead_of_what_a_training_step_takes():
    slowest = min(row["tokens_per_s"] for row in FOUND["reading"] if row["leaf_kib"] == 64)

    assert slowest > 20 * FOUND["training_tokens_per_cpu_s"]
