"""docs/redteam.md: its figures are those of the raw results, its table has every attack, and the bars are met."""

import json
from pathlib import Path

from phalanx.redteam.table import ATTACKS_ON_MODELS
from phalanx.train.train_section import LeakMeterConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = " ".join((ROOT / "docs" / "redteam.md").read_text(encoding="utf-8").split())


def result(name):
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))


def test_the_search_names_planted_models_and_leaves_clean_ones_alone():
    found = result("backdoor-search-cpu-2cores-busy.json")

    assert found["planted"] >= 10 <= found["clean"]
    assert found["found"] >= 0.9 * found["planted"]
    assert found["accused"] <= 0.1 * found["clean"]
    counts = f"in {found['found']} of {found['planted']} small planted models and accused {found['accused']} of"
    assert f"{counts} {found['clean']}" in PAGE


def test_the_meter_costs_at_most_a_fiftieth_at_its_default_interval():
    price = result("leak-meter-cpu-2cores-busy.json")

    assert price["every"] == LeakMeterConfig().every
    assert price["share"] <= 0.02
    steps = price["measurement_s"] / price["step_s"]
    assert f"as long as {steps:.1f} steps, {100 * price['share']:.1f} % of the time" in PAGE


def test_the_page_names_every_attack():
    shortened = {
        f"`_{name.removeprefix('membership_')}`" for name in ATTACKS_ON_MODELS if name.startswith("membership_")
    }

    missing = [name for name in ATTACKS_ON_MODELS if f"`{name}`" not in PAGE]
    assert {f"`_{name.removeprefix('membership_')}`" for name in missing} <= shortened
    assert all(f"`_{name.removeprefix('membership_')}`" in PAGE for name in missing)
