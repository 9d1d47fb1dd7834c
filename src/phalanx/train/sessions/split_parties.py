"""The parties of a split, as the owner records them: clients that are appraised or refused, certificates taken back."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from phalanx.config import digest_config
from phalanx.errors import FrameError, PeerRefusedError
from phalanx.pipeline import Observe, revocation_facts
from phalanx.security.crypto import Revocation
from phalanx.split import SplitConfig
from phalanx.split.channel import turn_messages as ask
from phalanx.split.channel.message import SplitMessage


class SplitRevocations:
    """A look before each turn whether every party of the run still has its certificate.

    Args:
        barred: Parties that the log of earlier sessions names as revoked, whatever the list says now.

    Guarantees:
        The enclave trains on turns of the owner alone, so of a revoked party no tensor is taken after the step under
        way. A split waits for all of its parties: one that is revoked ends the run.
    """

    def __init__(
        self,
        parties: Sequence[str],
        revoked: Callable[[], Mapping[str, Revocation]],
        barred: Collection[str],
        observe: Observe,
    ) -> None:
        self._parties, self._revoked, self._observe = tuple(parties), revoked, observe
        self._barred = set(barred)

    def check_revocations(self, step: int) -> None:
        """Return where none of them is revoked; before the turn of a step."""
        revoked = self._revoked()
        for name in self._parties:
            if name in revoked and name not in self._barred:
                self._observe("revoked", {**revocation_facts(revoked[name]), "step": step})
                self._barred.add(name)
        if gone := [name for name in self._parties if name in self._barred]:
            raise PeerRefusedError(
                f"{', '.join(gone)}: the certificate was revoked, but a split needs all its parties; begin "
                "another run without this party in the run file"
            )


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

    def take_refusal(self, message: SplitMessage) -> bool:
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


APPRAISED, EVIDENCE_REFUSED = "client_appraised", "client_evidence_refused"
"""Kinds of events: a client's evidence has passed; it has not, or was missing."""


class AppraisedClients:
    """The enclave's word on its clients' evidence in one session.

    Attributes:
        facts: Of each client with evidence that has passed: kind, policy, device and measurements of the latest one.
    """

    def __init__(self, split: SplitConfig, observe: Observe) -> None:
        self._expected = {name: digest_config(policy) for name, policy in split.client_policies.items()}
        self._observe = observe
        self.facts: dict[str, dict[str, Any]] = {}

    def take_appraisal(self, message: SplitMessage) -> bool:
        """Take word of a client's evidence; False for any other message."""
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

    def check_all_appraised(self) -> None:
        """Check that every client with a policy was appraised by it; before the first turn."""
        for name, policy in self._expected.items():
            if self.facts.get(name, {}).get("policy") != policy:
                raise FrameError(
                    f"{name}: is ready, but the enclave reported no evidence that meets "
                    f"split.client_policies.{name}; no step is trained"
                )
