"""A Flower app: its FedAvg, and a ClientApp that loads its model for each message, as in its tutorials."""

import importlib
import sys
from typing import Any

app: Any = importlib.import_module("flwr.app")
clientapp: Any = importlib.import_module("flwr.clientapp")
serverapp: Any = importlib.import_module("flwr.serverapp")
strategies: Any = importlib.import_module("flwr.serverapp.strategy")
training: Any = importlib.import_module("fl_training")

# without annotations, for Flower looks for them in this text
client_app = clientapp.ClientApp()
server_app = serverapp.ServerApp()


@client_app.train()  # type: ignore[untyped-decorator, unused-ignore]
def train_round(message: Any, context: Any) -> Any:
    """Train one round."""
    spec = training.read_spec()
    site = training.LocalTraining(spec, spec["sites"][int(context.node_config["partition-id"])])
    number = int(message.content["config"]["server-round"])
    weights = site.train(number, message.content["arrays"].to_torch_state_dict())
    arrays = {"arrays": app.ArrayRecord(weights), "metrics": app.MetricRecord({"num-examples": 1})}
    return app.Message(content=app.RecordDict(arrays), reply_to=message)


class FlowerFedAvg(strategies.FedAvg):  # type: ignore[misc]
    """Flower's FedAvg with rounds that wait for orders."""

    def __init__(self, spec: dict[str, Any]) -> None:
        sites = len(spec["sites"])
        super().__init__(fraction_evaluate=0.0, min_train_nodes=sites, min_available_nodes=sites)
        self._rounds = training.OrderedRounds(spec)

    def configure_train(self, *given: Any, **more: Any) -> Any:
        """Wait for an order first."""
        if not self._rounds.begin():
            raise SystemExit(0)
        return super().configure_train(*given, **more)

    def aggregate_train(self, number: int, replies: Any) -> Any:
        """Answer afterwards."""
        replies = list(replies)
        for reply in replies:
            if reply.has_error():
                raise RuntimeError(f"a site failed: {reply.error.reason}")
        aggregated = super().aggregate_train(number, replies)
        self._rounds.end()
        return aggregated


@server_app.main()  # type: ignore[untyped-decorator, unused-ignore]
def serve_rounds(grid: Any, context: Any) -> None:
    """Run all rounds."""
    del context
    spec = training.read_spec()
    arrays = app.ArrayRecord(training.start_weights(spec))
    FlowerFedAvg(spec).start(grid=grid, initial_arrays=arrays, num_rounds=spec["rounds"])


def main() -> None:
    """Run the app in Flower's simulation."""
    resources = {"init_args": {"num_cpus": 3}, "client_resources": {"num_cpus": 1}}
    sites = len(training.read_spec()["sites"])
    importlib.import_module("flwr.simulation").run_simulation(
        server_app=server_app, client_app=client_app, num_supernodes=sites, backend_config=resources
    )


if __name__ == "__main__":
    # workers find the app by its module's name, not as a program
    sys.exit(importlib.import_module("fl_flower").main())
