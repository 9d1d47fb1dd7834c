"""The clients that an enclave has appraised or refused, as the owner records them."""

from typing import Any

from phalanx.config import digest
from phalanx.errors import FrameError
from phalanx.pipeline import Observe
from phalanx.split import SplitConfig
from phalanx.split.channel import turn_messages as ask
from phalanx.split.channel.message import SplitMessage

APPRAISED, EVIDENCE_REFUSED = "client_appraised", "client_evidence_refused"
"""Kinds of events: a client's evidence has passed; it has not, or was missing."""


class AppraisedClients:
    """The enclave's word on its clients' evidence in one session.

    Attributes:
        facts: Of each client with evidence that has passed: kind, policy, device and measurements of the latest one.
    """

    def __init__(self, split: SplitConfig, observe: Observe) -> None:
        self._expected = {name: digest(policy) for name, policy in split.client_policies.items()}
        self._observe = observe
        self.facts: dict[str, dict[str, Any]] = {}

    def aside(self, message: SplitMessage) -> bool:
        """Take word of a client's evidence; False for any other message.

        Raises:
            FrameError: The run file has no policy for such a client.
        """
        if not isinstance(message, ask.ClientAppraised | ask.ClientEvidenceRefused):
            return False
        if message.client not in self._expected:
            raise FrameError(
                f"the enclave reported evidence of {message.client!r}; expected "
                f"{', '.join(self._expected) or 'none'}, of which split.client_policies has a policy"
            )
        if isinstance(message, ask.ClientEvidenceRefused):
            self.facts.pop(message.client, None)
            self._observe(EVIDENCE_REFUSED, message.model_dump(mode="json"))
            return True
        body = message.model_dump(mode="json")
        self.facts[message.client] = {name: value for name, value in body.items() if name != "client"}
        self._observe(APPRAISED, body)
        return True

    def check(self) -> None:
        """Check that every client with a policy was appraised by it; before the first turn.

        Raises:
            FrameError: The enclave has not said so of one of them.
        """
        for name, policy in self._expected.items():
            if self.facts.get(name, {}).get("policy") != policy:
                raise FrameError(
                    f"{name}: is ready, but the enclave reported no evidence that meets "
                    f"split.client_policies.{name}; no step is trained"
                )
