"""A real client process of a split that hangs in its third turn.

python hanging_client.py CLIENT.toml
"""

import sys
import threading
from pathlib import Path

from phalanx.split.roles.turns import TurnTaker
from phalanx.train.parties import client_process
from phalanx.train.parties.client_file import read_client


class HangingTaker(TurnTaker):
    """One whose third turn never ends."""

    def take_turns(self):
        self.turns = 0
        super().take_turns()

    def _take_turn(self, turn):
        self.turns += 1
        if self.turns == 3:
            hang_for_ever()
        super()._take_turn(turn)


def hang_for_ever():
    """Wait for what nobody does."""
    threading.Event().wait()


if __name__ == "__main__":
    client_process.TurnTaker = HangingTaker
    client_process.run_client(*read_client(Path(sys.argv[1])), print)
