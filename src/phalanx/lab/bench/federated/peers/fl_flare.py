"""A job of NVFlare's simulator: its FedAvg, and a client that loads its model once, as in its tutorials."""

import importlib
import sys
from pathlib import Path
from typing import Any

training: Any = importlib.import_module("fl_training")
workflows: Any = importlib.import_module("nvflare.app_common.workflows.fedavg")
models: Any = importlib.import_module("nvflare.app_common.abstract.fl_model")


class FlareFedAvg(workflows.FedAvg):  # type: ignore[misc]
    """NVFlare's FedAvg with rounds that wait for orders."""

    def load_model(self) -> Any:
        """Have the adapter that all start from."""
        spec = training.read_spec()
        self._rounds = training.OrderedRounds(spec)
        return models.FLModel(params={name: tensor.numpy() for name, tensor in training.start_weights(spec).items()})

    def sample_clients(self, *given: Any, **more: Any) -> Any:
        """Wait for an order first."""
        if not self._rounds.begin():
            raise SystemExit(0)
        return super().sample_clients(*given, **more)

    def save_model(self, model: Any) -> None:
        """Answer afterwards."""
        super().save_model(model)
        self._rounds.end()


def main() -> None:
    """Run the job."""
    spec = training.read_spec()
    api = importlib.import_module("nvflare.job_config.api")
    runner = importlib.import_module("nvflare.job_config.script_runner")
    job = api.FedJob(name="rounds", min_clients=len(spec["sites"]))
    controller = FlareFedAvg(num_clients=len(spec["sites"]), num_rounds=spec["rounds"])
    job.to_server(controller)
    job.to_clients(runner.ScriptRunner(script=str(Path(__file__).with_name("fl_flare_client.py"))))
    job.simulator_run(str(Path(spec["directory"]) / "flare"), clients=list(spec["sites"]), threads=len(spec["sites"]))


if __name__ == "__main__":
    sys.exit(importlib.import_module("fl_flare").main())
