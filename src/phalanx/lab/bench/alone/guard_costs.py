"""Write `guard_costs.json` and `guard_law.json` of the planner from the raw results that they name.

``python -m phalanx.lab.bench.alone.guard_costs LAW.json SCREEN.json``
"""

import json
import sys
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[3] / "planner/data"
GROSS = ("gradient_sign", "gradient_scale", "gradient_topk")


def costs(screen: Path) -> dict[str, object]:
    """The figures of `phalanx.planner.guard.finding.GuardCosts`."""
    cases: list[dict[str, Any]] = json.loads(screen.read_text(encoding="utf-8"))["rows"]
    return {
        "doubted_honest": round(max(case["doubted"]["none"] for case in cases), 3),
        "found_gross": round(min(case["doubted"][lie] for case in cases for lie in GROSS), 3),
        "sources": {"screen": screen.name},
    }


def price_law(result: Path) -> dict[str, object]:
    """The figures of `phalanx.planner.guard.price_law.PriceLaw`, as the result has them."""
    law: dict[str, object] = json.loads(result.read_text(encoding="utf-8"))["law"]
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in law.items()}


if __name__ == "__main__":
    law_result, screen_result = (Path(name) for name in sys.argv[1:3])
    for name, figures in (("guard_law.json", price_law(law_result)), ("guard_costs.json", costs(screen_result))):
        (DATA / name).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
