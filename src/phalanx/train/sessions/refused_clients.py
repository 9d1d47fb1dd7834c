"""The clients that an enclave's admission refuses, as the owner records them."""

from typing import Any

from phalanx.pipeline import Observe
from phalanx.split.channel import turn_messages as ask
from phalanx.split.channel.message import SplitMessage

REFUSED, EXCLUDED = "client_refused", "client_excluded"
"""Kinds of events: microbatches of a client do not count; a client is shut out for the rest of the run."""


class RefusedClients:
    """The refusals of one session.

    Attributes:
        facts: Refusals by client, and the clients that are shut out with step, reason, figure and bound.
        figures: Numbers of both, for every line of the metrics from now on.
    """

    def __init__(self, observe: Observe) -> None:
        self._observe = observe
        self.facts: dict[str, dict[str, Any]] = {"refusals": {}, "excluded": {}}
        self.figures = {"clients_refused": 0.0, "clients_excluded": 0.0}

    def aside(self, message: SplitMessage) -> bool:
        """Take word of a refusal; False for any other message."""
        if not isinstance(message, ask.ClientRefused):
            return False
        body, client = message.model_dump(mode="json", exclude={"is_excluded"}), message.client
        refusals, excluded = self.facts["refusals"], self.facts["excluded"]
        if message.is_excluded:
            excluded[client] = {name: fact for name, fact in body.items() if name != "client"}
        else:
            refusals[client] = refusals.get(client, 0) + 1
        self._observe(EXCLUDED if message.is_excluded else REFUSED, body)
        self.figures.update(clients_refused=float(sum(refusals.values())), clients_excluded=float(len(excluded)))
        return True
