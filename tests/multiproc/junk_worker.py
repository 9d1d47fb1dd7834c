"""A worker with an ordinary certificate that works for two steps and then sends junk: ``junk_worker.py FILE KIND``."""

import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.config import load_config
from phalanx.errors import PhalanxError
from phalanx.pipeline import run_worker
from phalanx.pipeline.config import WorkerConfig
from phalanx.security.crypto import Identity, Peer
from phalanx.transport import Endpoint, SignedHeader, TransportConfig, Wire

FROM_STEP = 2
MOST = 3000
"""Frames of junk: it stops by itself, whatever the owner does."""
LONG = "\x1b]0;owned\x07" + "j" * 900_000
STATE = {"step": 1, "weights": "0" * 64, "moments": "0" * 64}


class JunkEndpoint(Endpoint):
    """Sends what is asked of it, and from some step on junk beside it."""

    kind = "fault"

    def __init__(
        self, identity: Identity, peers: Mapping[str, Peer], run: str, wire: Wire, limits: TransportConfig
    ) -> None:
        self._begun = False
        super().__init__(identity, peers, run, wire, limits)

    def send_frame(
        self, receiver: str, kind: str, body: dict[str, Any], payload: Sequence[bytes | memoryview] = ()
    ) -> SignedHeader:
        if kind == "commit" and body["step"] >= FROM_STEP and not self._begun:
            self._begun = True
            threading.Thread(target=self._flood, args=(body,), daemon=True).start()
        return super().send_frame(receiver, kind, body, payload)

    def _flood(self, now: dict[str, Any]) -> None:
        place = {"epoch": now["epoch"], "step": now["step"]}
        junk: dict[str, tuple[str, dict[str, Any]]] = {
            "fault": (
                "fault",
                {"epoch": now["epoch"], "about": "south", "error": "E", "reason": LONG, "evidence": None},
            ),
            "ready": ("ready", {"epoch": now["epoch"], "states": {"0" * 5: STATE}, LONG: 1}),
            "applied": ("applied", {**place, "states": {"3": STATE}, "usage": {}, "bytes_sent": {}}),
        }
        try:
            for _ in range(MOST):
                if self.kind == "garbage":
                    self._wire.deliver_frame("owner", b"PHLX" + b"j" * 900_000, 5.0)
                else:
                    super().send_frame("owner", *junk[self.kind])
        except PhalanxError as exc:
            sys.stderr.write(f"stopped: {exc}\n")


if __name__ == "__main__":
    JunkEndpoint.kind = sys.argv[2]
    try:
        run_worker(load_config(Path(sys.argv[1]), WorkerConfig), open_endpoint=JunkEndpoint)
    except PhalanxError as exc:
        sys.exit(f"error: {exc}")
