"""One incident: the signed log of the operator's actions, and the orders that servers follow at once.

ACCESS_DIR/incidents/ID/incident.jsonl: signed by the operator, chained as every log here. The orders themselves are in
the signed file of keys, which each server looks at for every message that it sends.
"""

import logging
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from phalanx.config import printable_text
from phalanx.errors import AuditLogError, DiskError, InputError
from phalanx.security.audit import AuditLog, LogEntry, verify_log
from phalanx.security.crypto import Identity, Peer, load_signer, read_public_signer, steady_now
from phalanx.serve.access import KeyRecord, KeyStore, ModelOrder
from phalanx.serve.access.key_store import OPERATOR_FILE, OPERATOR_HOME

if TYPE_CHECKING:
    # opens models, which loads torch: to take a key out of service must not wait for that
    from phalanx.serve.incident.certified import CertifiedModel

INCIDENTS_FOLDER, INCIDENT_LOG = "incidents", "incident.jsonl"
CLOSED = "closed"
_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{6}")
_MAX_TITLE = 200
_log = logging.getLogger(__name__)


class IncidentCase:
    """An incident that is open in an access directory.

    Args:
        operator_home: Directory of the operator's key; ``operator`` in the access directory if None.

    Raises:
        CertificateError: The operator's key cannot be read.
    """

    def __init__(self, access: Path, incident: str, operator_home: Path | None = None) -> None:
        self.access, self.incident = access, incident
        self.directory = access / INCIDENTS_FOLDER / incident
        if not _ID.fullmatch(incident) or not self.directory.is_dir():
            raise InputError(
                f"{access}: has no incident {printable_text(incident, 40)!r}; begin one: phalanx incident open"
            )
        self._operator_home = operator_home
        self.identity: Identity = load_signer(operator_home or access / OPERATOR_HOME, access / OPERATOR_FILE)

    @classmethod
    def begin(cls, access: Path, title: str, operator_home: Path | None = None) -> Self:
        """Open an incident.

        Args:
            title: One line for people, such as "the key of alice leaked".

        Raises:
            CertificateError: The operator's key cannot be read.
        """
        load_signer(operator_home or access / OPERATOR_HOME, access / OPERATOR_FILE)
        incident = f"{steady_now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        try:
            (access / INCIDENTS_FOLDER / incident).mkdir(mode=0o750, parents=True)
        except OSError as exc:
            raise DiskError(f"{access}: takes no incident ({exc.strerror})") from exc
        case = cls(access, incident, operator_home)
        case.record_action("opened", {"title": printable_text(title, _MAX_TITLE)})
        return case

    def record_action(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Write one action of the operator."""
        with AuditLog(self.directory / INCIDENT_LOG, self.identity, self.incident) as log:
            log.append_event(kind, dict(facts))

    def quarantine_key(self, key: str) -> KeyRecord:
        """Take a key out of service; answers that are being sent to it end.

        Raises:
            KeyFileError: There is no such key, or the keys were altered.
        """
        record = self._open_keys().quarantine_key(key, is_quarantined=True)
        self.record_action("key_quarantined", {"key": key, "owner": record.terms.owner})
        return record

    def release_key(self, key: str) -> KeyRecord:
        """Put a key into service again.

        Raises:
            KeyFileError: There is no such key, or the keys were altered.
        """
        record = self._open_keys().quarantine_key(key, is_quarantined=False)
        self.record_action("key_released", {"key": key, "owner": record.terms.owner})
        return record

    def quarantine_model(self, model: str) -> ModelOrder:
        """Take a model out of service, by the id that clients name; answers that it is writing end."""
        order = self._order_model(model, is_quarantined=True)
        self.record_action("model_quarantined", {"model": model})
        return order

    def release_model(self, model: str) -> ModelOrder:
        """Put a model into service again; an order to go back to a checkpoint stays."""
        order = self._order_model(model, is_quarantined=False)
        self.record_action("model_released", {"model": model})
        return order

    def roll_back(self, model: str, certified: "CertifiedModel") -> None:
        """Have a model answer from a certified checkpoint alone, and release it for that."""
        order = self._make_order(model).model_copy(
            update={"digests": certified.digests, "checkpoint": str(certified.checkpoint), "is_quarantined": False}
        )
        self._open_keys().order_model(order)
        facts = {"model": model, "step": certified.step, "digest": certified.digests[0], "proof": certified.proof}
        self.record_action("model_rolled_back", {**facts, "skipped": list(certified.skipped)})

    def read_actions(self) -> list[LogEntry]:
        """Return all actions, after every line was checked."""
        lines: list[LogEntry] = []
        verify_log(self.directory / INCIDENT_LOG, self.identity.public, run=self.incident, visit=lines.append)
        return lines

    def _open_keys(self) -> KeyStore:
        return KeyStore.open(self.access, operator_home=self._operator_home)

    def _make_order(self, model: str) -> ModelOrder:
        orders = {order.model: order for order in self._open_keys().list_orders()}
        since = int(steady_now().timestamp())
        return orders.get(model, ModelOrder(model=model, since=since)).model_copy(update={"since": since})

    def _order_model(self, model: str, *, is_quarantined: bool) -> ModelOrder:
        order = self._make_order(model).model_copy(update={"is_quarantined": is_quarantined})
        self._open_keys().order_model(order)
        return order


def newest_case(access: Path, operator_home: Path | None = None) -> IncidentCase | None:
    """Return the incident that was opened last and is not closed; None where none is open.

    One whose log does not hold is passed over with a warning: to take a key out of service waits for no repair.

    Raises:
        CertificateError: The operator's key cannot be read.
    """
    names = sorted(path.name for path in (access / INCIDENTS_FOLDER).glob("*") if _ID.fullmatch(path.name))
    for name in reversed(names):
        case = IncidentCase(access, name, operator_home)
        try:
            actions = case.read_actions()
            if actions and all(line.kind != CLOSED for line in actions):
                return case
        except AuditLogError as exc:
            _log.warning("incident %s is passed over: %s", name, exc)
    return None


def operator_of(access: Path) -> Peer:
    """Return the operator that signs an access directory."""
    return read_public_signer(access / OPERATOR_FILE)
