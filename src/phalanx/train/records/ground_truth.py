"""The ground truth of a drill, as its attackers log it: the yardstick of a guard, never its input."""

import json
from pathlib import Path


class GroundTruth:
    """A reader of the attackers' own log, as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.attacked: set[tuple[str, int]] = set()
        """(party, step) of every step in which a party lied."""

    def refresh(self) -> None:
        """Read what was added; a line that is still being written waits for the next call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                record = json.loads(line)
                self.attacked.add((record["party"], record["step"]))
                self._offset += len(line)

    def attacked_steps(self) -> set[int]:
        """Steps in which an attacker lied."""
        return {step for _, step in self.attacked}
