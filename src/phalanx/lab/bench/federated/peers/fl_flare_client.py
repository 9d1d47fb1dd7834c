"""The script of a site in NVFlare: the model is loaded before the first round."""

import importlib
from typing import Any

training: Any = importlib.import_module("fl_training")
flare: Any = importlib.import_module("nvflare.client")


def main() -> None:
    """Train as many rounds as there are."""
    flare.init()
    site = training.LocalTraining(training.read_spec(), flare.get_site_name())
    while flare.is_running():
        model = flare.receive()
        if model is None:
            break
        weights = site.train(int(model.current_round) + 1, model.params)
        # tensors: arrays would be left out, with a warning in its log, and nothing would be averaged
        flare.send(flare.FLModel(params=weights, params_type="FULL", meta={"NUM_STEPS_CURRENT_ROUND": 1}))


if __name__ == "__main__":
    main()
