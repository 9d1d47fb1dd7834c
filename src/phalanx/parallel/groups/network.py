"""The addresses over which the ranks of a domain talk: private ones, unless the run file says otherwise.

torch's rendezvous unpickles received bytes, gloo and NCCL accept every connection, and none of them encrypts.
"""

import ipaddress
import socket
import struct
import sys

from phalanx.errors import ConfigError

_SHARED = ipaddress.ip_network("100.64.0.0/10")
"""Carrier-grade and overlay networks, which Python does not call private."""
_ADDRESS_OF_INTERFACE = 0x8915
"""The request SIOCGIFADDR."""
_ANY_PORT = 9


def is_private(address: str) -> bool:
    """Whether an address is of this machine alone, of a private network, of a link or of an overlay."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None) or ip
    return mapped.is_private or mapped.is_loopback or mapped.is_link_local or mapped in _SHARED


def check_private(address: str, what: str, *, unsafe: bool) -> None:
    """Refuse an address that a public network may reach.

    Args:
        what: The option or section that names it, for the message.
        unsafe: The run file allows it.
    """
    if unsafe or (is_private(address) and not ipaddress.ip_address(address.partition("%")[0]).is_unspecified):
        return
    raise ConfigError(
        f"{what}: {address} is not the address of a private network, and whoever reaches the ports of a domain can run "
        "code in every rank; use a private one, or say parallel.unsafe_public_network = true"
    )


def resolve_host(host: str) -> str:
    """The address of a host's name."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as exc:
        raise ConfigError(f"{host}: its address is not known: {exc}") from exc


def own_address(toward: str) -> str:
    """The address under which this machine would talk to another one; nothing is sent."""
    address = resolve_host(toward)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _ANY_PORT))
            return str(probe.getsockname()[0])
    except OSError as exc:
        raise ConfigError(f"{toward}: cannot be reached from here: {exc}") from exc


def address_of(interface: str) -> str | None:
    """The IPv4 address of an interface; None where it has none, or this system does not tell (Linux does)."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl  # noqa: PLC0415 - not on every system

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def interface_of(address: str) -> str | None:
    """The interface that has an address; None where it is not known."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if address_of(name) == address), None)


def listen_at(host: str, fallback: str, port: int) -> socket.socket:
    """Listen at one address and no other.

    Args:
        host: Name of this machine for the others.
        fallback: Its address where that name is one that something in between translates.
    """
    problem: OSError | None = None
    for address in dict.fromkeys((resolve_host(host), fallback)):
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen()
        except OSError as exc:
            listener.close()
            problem = exc
        else:
            return listener
    raise ConfigError(f"parallel: rank 0 cannot listen at {host}, port {port}: {problem}") from problem
