"""Receipts of what this party sent, by the digest of the header they are for."""

import threading

from phalanx.transport.frame import Receipt


class Receipts:
    """Grows with every frame sent until `forget_before` is told what nobody will dispute any more."""

    def __init__(self) -> None:
        self._by_digest: dict[str, Receipt] = {}
        self._order: dict[str, dict[int, str]] = {}
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._by_digest)

    def add(self, receipt: Receipt, sequence: int) -> None:
        """Keep a checked receipt."""
        with self._changed:
            self._by_digest[receipt.header_digest] = receipt
            self._order.setdefault(receipt.receiver, {})[sequence] = receipt.header_digest
            self._changed.notify_all()

    def get(self, header_digest: str) -> Receipt | None:
        """Return the receipt for a header, or None while there is none."""
        return self._by_digest.get(header_digest)

    def wait(self, header_digest: str, timeout_s: float) -> Receipt | None:
        """Return the receipt for a header, or None when it does not come within the time."""
        with self._changed:
            self._changed.wait_for(lambda: header_digest in self._by_digest, timeout_s)
            return self._by_digest.get(header_digest)

    def forget_before(self, receiver: str, sequence: int) -> None:
        """Drop the receipts of one link for all frames before this number."""
        with self._changed:
            link = self._order.get(receiver, {})
            # a link delivers in order, so the oldest comes first
            while link and (oldest := next(iter(link))) < sequence:
                del self._by_digest[link.pop(oldest)]
