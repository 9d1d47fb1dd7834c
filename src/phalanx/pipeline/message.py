"""What every message between the parties of a verified pipeline has."""

from pydantic import Field

from phalanx.transport import Body


class Message(Body):
    """What parties of a verified pipeline say to each other."""

    epoch: int = Field(ge=0)
    """Rises by one whenever the assignment changes; what belongs to an older epoch is dropped."""
