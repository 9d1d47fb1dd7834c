"""A look at an address before anything expensive is begun: can this machine listen there?"""

import os
import socket

from phalanx.errors import TransportError
from phalanx.transport.config import TransportConfig


def check_port(config: TransportConfig, key: str) -> None:
    """Refuse an address that another process has, or that is none of this machine's; 0 is any free port.

    Args:
        config: Where a party will listen.
        key: The section that says so, for the message.

    Raises:
        TransportError: It cannot be listened at now. What comes between this look and the listening is found then.
    """
    if not config.port:
        return
    family = socket.AF_INET6 if ":" in config.bind else socket.AF_INET
    try:
        socket.create_server((config.bind, config.port), family=family).close()
    except OSError as exc:
        # Python puts the address into the text of the reason, which the message has already
        why = os.strerror(exc.errno or 0)
        do = f"end what listens there, or change {key}.port or {key}.bind"
        raise TransportError(f"{config.bind}:{config.port}: cannot listen ({why}); {do}").about(
            code="PHX-T002", key=f"{key}.port", found=f"{config.bind}:{config.port}", do=do
        ) from exc
