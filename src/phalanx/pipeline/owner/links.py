"""The owner's side of all links."""

from collections.abc import Collection
from dataclasses import dataclass

from phalanx.pipeline.membership.members import Incarnations
from phalanx.pipeline.protocol.mailbox import Mailbox
from phalanx.pipeline.protocol.message import Message
from phalanx.pipeline.protocol.patience import Patience
from phalanx.transport import Endpoint


@dataclass(frozen=True)
class OwnerLinks:
    """The owner's links: what goes out to parties and comes in from them, and how long nothing has come.

    Attributes:
        endpoint: The owner's end of them; refuses those that are shut out.
        mail: Parses what comes and posts what goes.
        incarnations: Knows which parties may come back, and under which names.
        patience: Tells when nothing has happened for too long.
    """

    endpoint: Endpoint
    mail: Mailbox
    incarnations: Incarnations
    patience: Patience

    def tell(self, parties: Collection[str], message: Message) -> None:
        """Post one message to several parties."""
        for name in parties:
            self.mail.post(name, message, ())

    def shut_out(self, party: str, *, for_good: bool) -> None:
        """Take nothing more of a party in this incarnation of it, or in any."""
        self.endpoint.refuse(party)
        self.incarnations.ended(party, for_good=for_good)
