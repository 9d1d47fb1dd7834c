"""The base of every message between the parties of a verified pipeline."""

from phalanx.pipeline.protocol.bounds import Epoch
from phalanx.transport import Body


class Message(Body):
    """A message between parties of a verified pipeline."""

    epoch: Epoch
    """Rises by one whenever the assignment changes; what belongs to an older epoch is dropped."""
