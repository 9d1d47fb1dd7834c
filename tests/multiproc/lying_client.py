"""A real client process of a split in hostile hands: what its front sends is no number.

python lying_client.py CLIENT.toml
"""

import math
import sys
from pathlib import Path

from phalanx.split import FrontPart
from phalanx.train.parties import client_process
from phalanx.train.parties.client_file import read_client


class NotFinite(FrontPart):
    """Activations that are no numbers."""

    def __call__(self, ids):
        return super().__call__(ids) * math.nan


if __name__ == "__main__":
    client_process.FrontPart = NotFinite
    client_process.run_client(*read_client(Path(sys.argv[1])), print)
