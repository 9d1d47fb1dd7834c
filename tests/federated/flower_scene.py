"""Flower without Flower: what our app calls of it, with nodes as threads, so that the app's two ends run here."""

import importlib
import itertools
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


@dataclass
class Array:
    dtype: str
    shape: tuple[int, ...]
    stype: str
    data: bytes


class Record(dict):
    pass


class ArrayRecord(Record):
    pass


class ConfigRecord(Record):
    pass


class RecordDict(Record):
    pass


class Message:
    """A message or the reply to one; ids come when it is pushed."""

    def __init__(self, content=None, node=0, kind="", *, reply_to=None, error=None):
        self.content, self.error = content, error
        asked = "" if reply_to is None else reply_to.metadata.message_id
        self.metadata = SimpleNamespace(message_id="", reply_to_message_id=asked, node=node, kind=kind)

    def has_error(self):
        return self.error is not None


class App:
    """A ServerApp or a ClientApp: functions by the kind of message."""

    def __init__(self):
        self.functions = {}

    def __getattr__(self, kind):
        if kind not in ("train", "query", "main"):
            raise AttributeError(kind)
        return lambda: lambda function: self.functions.setdefault(kind, function)


def load_app() -> Any:
    """Import our app's module over this Flower."""
    made = {name: ModuleType(name) for name in ("flwr", "flwr.app", "flwr.clientapp", "flwr.serverapp")}
    for one in (Array, ArrayRecord, ConfigRecord, Message, RecordDict):
        setattr(made["flwr.app"], one.__name__, one)
    made["flwr.app"].Context = made["flwr.serverapp"].Grid = object
    made["flwr.clientapp"].ClientApp = made["flwr.serverapp"].ServerApp = App
    kept = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        return importlib.import_module("phalanx.federated.carriers.flower_shim")
    finally:
        for name, one in kept.items():
            del sys.modules[name]
            if one is not None:
                sys.modules[name] = one


APP = load_app()


class Grid:
    """A SuperLink and its SuperNodes, which run the ClientApp in a thread for each message.

    Attributes:
        nodes: The site of each node, as it says of itself.
        tamper: Alters a reply to a frame before the ServerApp gets it; takes the reply, its node and the frame asked.
    """

    def __init__(self, nodes: dict[int, str], socket: str) -> None:
        self.nodes, self._socket = nodes, socket
        self.tamper = lambda reply, node, frame: reply
        self.asked: list[Message] = []
        self._numbers = itertools.count(1)
        self._replies: dict[str, Message] = {}

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        for one in messages:
            one.metadata.message_id = f"m{next(self._numbers)}"
            self.asked.append(one)
            threading.Thread(target=self._run, args=(one,), daemon=True).start()
            yield one.metadata.message_id

    def pull_messages(self, numbers):
        return [self._replies.pop(one) for one in numbers if one in self._replies]

    def _run(self, asked):
        node, kind = asked.metadata.node, asked.metadata.kind
        site = self.nodes.get(node, "")
        context = SimpleNamespace(node_config={"site": site}, run_config={"site-socket": self._socket})
        reply = APP.client_app.functions[kind](asked, context)
        if kind == "train":
            reply = self.tamper(reply, node, asked.content["frame"]["frame"].data)
        if reply is not None:
            self._replies[asked.metadata.message_id] = reply


class FlowerEngine:
    """As `bridge_scene.ForwardingEngine`: our Flower app between the owner's socket and the sites'."""

    def __init__(self, owner: Path, sites: dict[str, Path]) -> None:
        self.touch = lambda site, answer, frame: answer
        self.frames: dict[str, list[bytes]] = {site: [] for site in sites}
        # both ends look more often here
        APP._LOOK_EVERY_S, APP._NODES_EVERY_S = 0.02, 0.05
        template = next(iter(sites.values())).parent.parent / "{site}" / "site.sock"
        self.grid = Grid(dict(enumerate(sites, 7)), str(template))
        self.grid.tamper = self._tamper
        self._line = APP.OwnerConnection(str(owner))
        self._relay = APP.FrameRelay(self.grid, self._line)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        try:
            self._relay.relay_frames()
        except APP.SocketLostError:
            return

    def named(self, node):
        """Whether a node has said of which site it is."""
        return self._relay._nodes.get(node) is not None

    def _tamper(self, reply, node, frame):
        site = self.grid.nodes.get(node, "")
        self.frames.setdefault(site, []).append(frame)
        if "frame" in reply.content:
            array = reply.content["frame"]["frame"]
            array.data = self.touch(site, array.data, frame)
        return reply

    def close(self) -> None:
        self._line.close()
        self._thread.join(10.0)
