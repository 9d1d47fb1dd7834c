"""Write tests/aggregators/byzfl_answers.json: what byzfl's rules make of fixed inputs.

``PYTHON_WITH_BYZFL scripts/byzfl_answers.py``; byzfl 0.0.11 imports torchvision, matplotlib and seaborn, which the
rules do not use, and which are stubbed here. Its CAF starts from a random direction, so it is not asked.
"""

import json
import sys
from pathlib import Path
from unittest import mock

FILE = Path(__file__).parents[1] / "tests" / "aggregators" / "byzfl_answers.json"


def main() -> None:
    """Ask byzfl."""
    for name in ("torchvision", "matplotlib", "matplotlib.pyplot", "seaborn"):
        sys.modules[name] = mock.MagicMock()
    import numpy as np  # noqa: PLC0415
    from byzfl.aggregators import aggregators, preaggregators  # noqa: PLC0415

    draw, inputs = np.random.default_rng(1), {}
    for clients, byzantine, shift in ((7, 2, 0.0), (7, 2, 8.0), (11, 3, -4.0), (12, 4, 3.0)):
        updates = draw.normal(size=(clients, 6))
        updates[:byzantine] += shift
        inputs[f"{clients} clients, {byzantine} moved by {shift:g}"] = {
            "byzantine": byzantine,
            "updates": updates.round(6).tolist(),
        }
    rules = {
        "median": lambda f: aggregators.Median(),
        "trimmed_mean": aggregators.TrMean,
        "krum": aggregators.Krum,
        "multi_krum": aggregators.MultiKrum,
        "geometric_median": lambda f: aggregators.GeometricMedian(nu=1e-12, T=3000),
        "centered_clipping": lambda f: aggregators.CenteredClipping(L=3, tau=1.5),
        "mda": aggregators.MDA,
        "nnm": preaggregators.NNM,
    }
    answers = {
        name: {
            given: np.asarray(make(case["byzantine"])(np.array(case["updates"]))).tolist()
            for given, case in inputs.items()
        }
        for name, make in rules.items()
    }
    content = {"byzfl": "0.0.11", "inputs": inputs, "answers": answers}
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
