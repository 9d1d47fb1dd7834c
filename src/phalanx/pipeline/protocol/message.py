"""What every message between the parties of a verified pipeline has."""

from phalanx.pipeline.protocol.bounds import Epoch
from phalanx.transport import Body


class Message(Body):
    """What parties of a verified pipeline say to each other."""

    epoch: Epoch
    """Rises by one whenever the assignment changes; what belongs to an older epoch is dropped."""
