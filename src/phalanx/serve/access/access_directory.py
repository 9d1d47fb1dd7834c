"""An access directory, opened for one server: keys, budgets and log together."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from phalanx.closing import Closeable
from phalanx.errors import AuditLogError, DiskError
from phalanx.security.crypto import Peer, load_signer, make_signer
from phalanx.serve.access.budgets import BUDGETS_FILE, Budgets
from phalanx.serve.access.key_store import KeyStore
from phalanx.serve.access.request_log import LOG_FOLDER, RequestLog
from phalanx.serve.access.sealed_texts import TextSealer

SERVER_HOME, SERVER_FILE = "server", "server.json"
_SYNC_S = 1.0
_REFUSALS_EVERY = 60


@dataclass(frozen=True)
class Access(Closeable):
    """All that decides about requests, and remembers them."""

    key_store: KeyStore
    budgets: Budgets
    request_log: RequestLog

    @classmethod
    def open(cls, directory: Path, operator: Peer | None = None, seal_texts: Path | None = None) -> Self:
        """Open a directory that ``phalanx keys create`` made; the server's own key is made at the first time.

        Args:
            operator: The signer of the keys; that of the directory if None.
            seal_texts: Public half of the key for which texts of requests are sealed in the log; None logs none.

        Raises:
            AuditLogError: The log was altered, or another server is at work in the directory.
            CertificateError: A key or its public half cannot be read.
            DiskError: The disk refuses, or another server is at work in the directory.
        """
        sealer = None if seal_texts is None else TextSealer.read(seal_texts)
        key_store = KeyStore.open(directory, operator=operator)
        home, public_file = directory / SERVER_HOME, directory / SERVER_FILE
        identity = load_signer(home, public_file) if home.exists() else make_signer(home, public_file, "server")
        budgets = Budgets(directory / BUDGETS_FILE, key_store.limits_of)
        try:
            request_log = RequestLog(directory / LOG_FOLDER, identity, sealer=sealer)
        except (AuditLogError, DiskError):
            budgets.close()
            raise
        return cls(key_store, budgets, request_log)

    async def keep_synced(self) -> None:
        """Force counts and lines to disk each second, until it is cancelled."""
        turn = 0
        while True:
            await asyncio.sleep(_SYNC_S)
            turn += 1
            if turn % _REFUSALS_EVERY == 0:
                self.request_log.write_refusals()
            await asyncio.to_thread(self._sync)

    def close(self) -> None:
        """Write pending lines and let another server use the directory; closing twice is harmless."""
        self.request_log.close()
        self.budgets.close()

    def _sync(self) -> None:
        self.budgets.sync()
        self.request_log.sync()
