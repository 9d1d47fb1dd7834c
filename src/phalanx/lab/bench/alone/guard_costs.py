"""Write `planner/data/guard_costs.json` from the raw results that it names.

``python -m phalanx.lab.bench.alone.guard_costs OVERHEAD.json WORK.json SCREEN.json``
"""

import json
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[3] / "planner/data/guard_costs.json"
GROSS = ("gradient_sign", "gradient_scale", "gradient_topk")


def costs(overhead: Path, work: Path, screen: Path) -> dict[str, object]:
    """The figures of `phalanx.planner.guard.finding.GuardCosts`."""
    guarded = [row for row in _rows(overhead) if row["shadow"] == "gradient" and (row["K"], row["M"]) == (4, 8)]
    audited = [row for row in guarded if row["mode"] == "phalanx"]
    (alone,) = _rows(work)
    cases = _rows(screen)
    return {
        "audited_share": round(alone["audited_share"], 3),
        "screened_share": round(alone["screened_share"], 3),
        "fixed_share": round(max(row["extra_compute"] - row["part_audit"] for row in audited), 3),
        "doubted_honest": round(max(case["doubted"]["none"] for case in cases), 3),
        "found_gross": round(min(case["doubted"][lie] for case in cases for lie in GROSS), 3),
        "sources": {"fixed": overhead.name, "work": work.name, "screen": screen.name},
    }


def _rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


if __name__ == "__main__":
    figures = costs(*(Path(name) for name in sys.argv[1:4]))
    TARGET.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
