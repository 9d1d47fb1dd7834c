"""docs/exact_numerics.md: the table of digests is the raw result's, and shows one law where torch has four."""

import json
from pathlib import Path

from phalanx.lab.attacks import ATTACKS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "exact_numerics.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"


def rows_of(part):
    path = RESULTS / f"exact-numerics-{part}-cpu-2cores.json"
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


def test_every_digest_of_the_page_is_the_raw_result_s():
    rows = [row for row in rows_of("digests") if row["digests"] is not None]
    digests = [[row["digests"][law] for law in ("float", "exact", "exact_fast")] for row in rows]
    table = [
        f"| {row['kernels']} | {' | '.join(digest[:8] for digest in drawn)} |\n"
        for row, drawn in zip(rows, digests, strict=True)
    ]

    assert len(rows) == 7
    assert "".join(table) in PAGE
    assert [len(set(column)) for column in zip(*digests, strict=True)] == [4, 1, 1]


def test_the_fleet_of_the_page_is_the_raw_result_s():
    path = RESULTS / "exact-fleet-cpu-2cores-busy.json"
    honest = json.loads(path.read_text(encoding="utf-8"))["honest"]
    digest, verdicts = honest["final_weights_digest"], honest["verdicts"]

    assert f"for {honest['steps']} honest steps: {honest['audits']:,} audits, {len(verdicts)} verdicts" in PAGE
    assert f"an unguarded fleet of one class, `{digest[:8]}`" in PAGE
    assert (honest["status"], verdicts, honest["evicted"], honest["lost"]) == ("completed", [], [], [])
    assert digest == honest["digest_of_one_class"]


def test_the_attacked_fleet_of_the_page_is_the_raw_result_s():
    path = RESULTS / "exact-fleet-attacked-cpu-2cores-busy.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["attacked"]
    named = [row for row in rows if row["blamed"] == ["worker-2"] and row["steps_to_detection"] == 0]

    assert (
        f"In it {len(rows)} attacks of the table were played by worker-2, from step 2 of {rows[0]['steps']} on" in PAGE
    )
    assert f"{len(named)} liars were named in the step of their first lie and undone" in PAGE
    assert [row["attack"] for row in rows if row not in named] == ["withheld_answer"]
    assert all(row["bit_identical"] and not row["lost"] and not row["false_accusations"] for row in rows)
    assert {row["attack"] for row in rows} < set(ATTACKS)
    assert "The other kinds were not played" in PAGE


def test_the_price_of_the_page_is_the_raw_result_s():
    price = {row["numerics"]: row["price"] for row in rows_of("price")}

    assert (
        f"{price['exact']:.2f} times the CPU time of float32 with `exact` and {price['exact_fast']:.2f} times" in PAGE
    )
    assert price["exact"] < 2.0
    assert price["exact_fast"] < 1.3


def test_compiled_loops_pay_with_equal_weights():
    path = RESULTS / "exact-numerics-price-fused-cpu-2cores-busy.json"
    rows = {(row["numerics"], row["fused"]): row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
    exact, fast = ([rows[grade, fused] for fused in (False, True)] for grade in ("exact", "exact_fast"))

    for eager, compiled in (exact, fast):
        assert eager["digest"] == compiled["digest"]
        assert compiled["price"] < 0.9 * eager["price"]
    first, second, third, fourth = (row["price"] for row in (*exact, *fast))
    assert f"took {first:.2f} times the CPU time of float32 by eager operations and {second:.2f} times with" in PAGE
    assert f"(`exact`), {third:.2f} and {fourth:.2f} times (`exact_fast`)" in PAGE


def test_the_losses_of_the_page_are_the_raw_result_s_and_within_the_noise_of_a_seed():
    rows = {(row["numerics"], row["seed"]): row for row in rows_of("losses")}
    base = rows["float", 1]
    apart = {
        key: max(abs(a - b) for a, b in zip(base["losses"], row["losses"], strict=True)) for key, row in rows.items()
    }
    means = [rows[key]["mean_of_last_50"] for key in (("float", 1), ("exact", 1), ("exact_fast", 1), ("float", 2))]

    assert f"than {apart['exact', 1]:.3f} (`exact`) and {apart['exact_fast', 1]:.3f} (`exact_fast`)" in PAGE
    assert f"from another seed {apart['float', 2]:.3f}; " in PAGE
    assert "are {:.3f}, {:.3f}, {:.3f} and, from the other seed, {:.3f}".format(*means) in PAGE
    assert max(apart["exact", 1], apart["exact_fast", 1]) < apart["float", 2]
    assert len(base["losses"]) == 500
