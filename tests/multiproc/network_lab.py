"""A network of our own: each party in a network namespace, and every packet between them through our hands.

A switch in this process reads packets from a TUN device in each namespace and puts them into another one, later or
not at all. Nothing of it has a name in the system: namespaces and devices end with the descriptors of this process.
"""

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN_WITHOUT_HEADER = 0x1001
_NETWORK = "10.77.0."
_IPV4 = 4


@dataclass
class Wire:
    """What happens to the packets from one party to another."""

    delay_s: float = 0.0
    loss: float = 0.0
    is_cut: bool = False


@dataclass
class Lab:
    """Parties by name, each with an address that only the others of the lab can reach.

    Attributes:
        dropped: Packets that were cut off or lost, by sender and receiver.
        passed: Packets that went through.
    """

    names: Sequence[str]
    seed: int = 0
    dropped: Counter[tuple[str, str]] = field(default_factory=Counter)
    passed: Counter[tuple[str, str]] = field(default_factory=Counter)
    wires: dict[tuple[str, str], Wire] = field(default_factory=dict)
    _namespaces: dict[str, int] = field(default_factory=dict)
    _devices: dict[str, int] = field(default_factory=dict)

    def address(self, name: str) -> str:
        """Where a party is."""
        return f"{_NETWORK}{self.names.index(name) + 1}"

    def inside(self, name: str) -> list[str]:
        """What to put before a command so that it runs where a party is."""
        return ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self._namespaces[name]}"]

    def everywhere(self, **changes: float) -> None:
        """Change all wires."""
        for wire in self.wires.values():
            for name, value in changes.items():
                setattr(wire, name, value)

    def cut(self, sender: str, receiver: str) -> None:
        """Let nothing more through in one direction."""
        self.wires[sender, receiver].is_cut = True

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Make it, and take it apart.

        Raises:
            OSError: This system does not let us.
        """
        with contextlib.ExitStack() as stack:
            for name in self.names:
                _in_a_thread(lambda name=name: self._add(name, stack))
                for other in self.names:
                    self.wires[name, other] = Wire()
            ends, stop = os.pipe()
            stack.callback(os.close, ends)
            thread = threading.Thread(target=self._switch, args=(ends,), daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(os.close, stop)
            yield

    def _add(self, name: str, stack: contextlib.ExitStack) -> None:
        """A namespace with a device; runs in a thread of its own, which leaves ours for it."""
        if shutil.which("nsenter") is None or shutil.which("ip") is None:
            raise FileNotFoundError("nsenter and ip are needed")
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "a network namespace cannot be made")
        self._namespaces[name] = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        stack.callback(os.close, self._namespaces[name])
        device = self._devices[name] = os.open("/dev/net/tun", os.O_RDWR)
        stack.callback(os.close, device)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"lab0", _IFF_TUN_WITHOUT_HEADER))
        for command in (
            ("addr", "add", f"{self.address(name)}/24", "dev", "lab0"),
            ("link", "set", "lab0", "up"),
            ("link", "set", "lo", "up"),
        ):
            if subprocess.run(["ip", *command], check=False).returncode:
                raise OSError(f"ip {' '.join(command)} failed")

    def _switch(self, ends: int) -> None:
        names = {device: name for name, device in self._devices.items()}
        chance, late, number = random.Random(self.seed), [], 0
        while True:
            wait_s = max(late[0][0] - time.monotonic(), 0.0) if late else None
            readable, _, _ = select.select([ends, *names], [], [], wait_s)
            if ends in readable:
                return
            for device in readable:
                packet = os.read(device, 65536)
                way = (names[device], self._receiver(packet))
                wire = self.wires.get(way)
                if wire is None or wire.is_cut or chance.random() < wire.loss:
                    self.dropped[way] += 1
                    continue
                number += 1
                heapq.heappush(late, (time.monotonic() + wire.delay_s, number, way, packet))
            while late and late[0][0] <= time.monotonic():
                _, _, way, packet = heapq.heappop(late)
                self.passed[way] += 1
                # its device is up until the switch has ended
                os.write(self._devices[way[1]], packet)

    def _receiver(self, packet: bytes) -> str:
        if packet[0] >> 4 != _IPV4:
            return ""
        place = ".".join(str(part) for part in packet[16:20]).removeprefix(_NETWORK)
        return self.names[int(place) - 1] if place.isdecimal() and 1 <= int(place) <= len(self.names) else ""


def _in_a_thread(act) -> None:
    """Run something in a thread that ends with it, and raise here what it raised there."""
    errors = []

    def run() -> None:
        try:
            act()
        except OSError as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in errors:
        raise error
