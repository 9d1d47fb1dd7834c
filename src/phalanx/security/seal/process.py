"""Objects that belong to one process: a copy of them would use the same nonces a second time."""

import os
from typing import NoReturn

from phalanx.errors import SealError
from phalanx.security.seal.refusal import SealRefusal


class BoundToProcess:
    """An object that refuses to be copied or pickled, and to work in a fork.

    Not found out: a snapshot of the whole machine that is started twice. Only an enclave that cannot be
    snapshotted excludes that.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    def check_process(self) -> None:
        """Return in the process that made this object.

        Raises:
            SealError: This is a fork of it.
        """
        if os.getpid() != self._pid:
            raise SealError(SealRefusal.FORKED, "channel: belongs to the process that was forked; open another one")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(f"{type(self).__name__} is never copied or pickled: its nonces would be used twice")
