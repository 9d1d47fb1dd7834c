"""Flower's side of the bridge: its ServerApp and its ClientApps forward frames, and look at none.

The app's folder has this file and `shim.py`, as a package of its own: phalanx need not be installed where Flower is.
Flower starts a process for each message; the model is in the site's own process, which stays.
"""

import os
import time
from typing import NamedTuple

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

# the app's folder has both files beside each other, under another package's name
from .shim import END, OwnerConnection, ShimMessage, SocketLostError, ask_site

_FRAME, _LOST, _SITE = "frame", "lost", "site"
_LOOK_EVERY_S, _NODES_EVERY_S = 0.2, 2.0

# plain assignments, for Flower looks for them in this text
client_app = ClientApp()
server_app = ServerApp()


@client_app.query()  # type: ignore[untyped-decorator, unused-ignore]
def report_site_name(message: Message, context: Context) -> Message:
    """Say of which site this node is; that it is true is proved by the site's frames alone."""
    return _make_reply(message, _SITE, str(context.node_config.get(_SITE, "")))


@client_app.train()  # type: ignore[untyped-decorator, unused-ignore]
def deliver_frame(message: Message, context: Context) -> Message:
    """Deliver one frame to the site's process on this machine, and bring back its answer."""
    site = str(context.node_config.get(_SITE, ""))
    path = os.path.expanduser(str(context.run_config["site-socket"]).replace("{site}", site))
    try:
        return Message(_pack_frame(ask_site(path, _frame_in(message.content))), reply_to=message)
    except SocketLostError as exc:
        return _make_reply(message, _LOST, str(exc))


@server_app.main()  # type: ignore[untyped-decorator, unused-ignore]
def run_relay(grid: Grid, context: Context) -> None:
    """Forward frames until the owner ends the run, or is gone."""
    owner = OwnerConnection(str(context.run_config["owner-socket"]))
    try:
        FrameRelay(grid, owner).relay_frames()
    finally:
        owner.close()


class _Question(NamedTuple):
    """The open purpose of a message to a node: the answer to an order, or without an order the name of its site."""

    node: int
    order: ShimMessage | None


class FrameRelay:
    """The loop of Flower's server: frames go to the node of their site, and answers to the owner."""

    def __init__(self, grid: Grid, line: OwnerConnection) -> None:
        self._grid, self._line = grid, line
        self._nodes: dict[int, str | None] = {}
        self._open: dict[str, _Question] = {}
        # by site, the last answer that was handed in; and, by node, when its answer was last found not to be the site's
        self._answered: dict[str, _Question] = {}
        self._doubted: dict[int, int] = {}
        self._num_doubts = 0
        line.note_refused = self._doubt_answer
        self._looked = float("-inf")

    def relay_frames(self) -> None:
        """Forward until the owner ends the run."""
        while True:
            self._look_for_nodes()
            order = self._line.next_frame(_LOOK_EVERY_S)
            if order is not None and order.kind == END:
                return
            if order is not None:
                self._forward_frame(order)
            self._collect_replies()

    def _look_for_nodes(self) -> None:
        """Ask new nodes for the name of their site, and forget nodes that left."""
        if time.monotonic() - self._looked < _NODES_EVERY_S:
            return
        self._looked = time.monotonic()
        node_ids, before = set(self._grid.get_node_ids()), self._site_nodes()
        self._nodes = {node: site for node, site in self._nodes.items() if node in node_ids}
        self._doubted = {node: number for node, number in self._doubted.items() if node in node_ids}
        self._open = {number: query for number, query in self._open.items() if query.order or query.node in node_ids}
        for node in sorted(node_ids - set(self._nodes)):
            self._nodes[node] = None
            self._ask_node(Message(RecordDict(), node, "query"), _Question(node, None))
        self._tell_sites(before)

    def _site_nodes(self) -> dict[str, int]:
        """Return the node of each site.

        If several nodes claim a site, the first keeps it, so that none can take its place, unless its answers are not
        the site's: then the others are asked in turn, for a name here is anybody's word, and only frames prove it.
        """
        nodes: dict[str, int] = {}
        for node, site in sorted(self._nodes.items(), key=lambda item: self._doubted.get(item[0], -1)):
            if site:
                nodes.setdefault(site, node)
        return nodes

    def _doubt_answer(self, site: str, number: int) -> None:
        """Ask another node of this site from now on, if there is one, than the one that was asked this."""
        answered = self._answered.pop(site, None)
        asked = [question for question in (answered, *self._open.values()) if question is not None]
        for question in asked:
            if question.order is not None and question.order.number == number:
                self._doubt_node(question.node)
        self._open = {
            key: question
            for key, question in self._open.items()
            if question.order is None or question.order.number != number
        }

    def _doubt_node(self, node: int) -> None:
        self._num_doubts += 1
        self._doubted[node] = self._num_doubts

    def _tell_sites(self, before: dict[str, int]) -> None:
        now = self._site_nodes()
        if set(now) != set(before):
            self._line.tell_sites(now)

    def _forward_frame(self, order: ShimMessage) -> None:
        # the owner goes on in this conversation, so the answer before was the site's
        if (proven := self._answered.pop(order.name, None)) is not None:
            self._doubted.pop(proven.node, None)
        node = self._site_nodes().get(order.name)
        if node is None:
            self._line.report_loss(order.number, order.name, "no node belongs to this site")
            return
        self._ask_node(Message(_pack_frame(order.data), node, "train"), _Question(node, order))

    def _ask_node(self, message: Message, question: _Question) -> None:
        pushed = list(self._grid.push_messages([message]))
        if pushed and pushed[0]:
            self._open[pushed[0]] = question
        elif question.order is not None:
            self._line.report_loss(question.order.number, question.order.name, "Flower does not accept the frame")
        else:
            # asked again at the next look
            self._nodes.pop(question.node)

    def _collect_replies(self) -> None:
        if not self._open:
            return
        for reply in self._grid.pull_messages(list(self._open)):
            question = self._open.pop(reply.metadata.reply_to_message_id, None)
            if question is not None and question.order is not None:
                self._send_answer(question, question.order, reply)
            elif question is not None and question.node in self._nodes:
                self._name_node(question.node, reply)

    def _name_node(self, node: int, reply: Message) -> None:
        before = self._site_nodes()
        if reply.has_error():
            self._nodes.pop(node)
        else:
            self._nodes[node] = _read_word(reply.content, _SITE)
        self._tell_sites(before)

    def _send_answer(self, question: _Question, order: ShimMessage, reply: Message) -> None:
        if reply.has_error():
            self._report_loss(question, order, str(reply.error.reason))
            return
        try:
            frame = _frame_in(reply.content)
        except SocketLostError as exc:
            self._report_loss(question, order, _read_word(reply.content, _LOST) or str(exc))
            return
        self._answered[order.name] = question
        self._line.send_answer(order.number, order.name, frame)

    def _report_loss(self, question: _Question, order: ShimMessage, reason: str) -> None:
        self._doubt_node(question.node)
        self._line.report_loss(order.number, order.name, reason)


def _pack_frame(frame: bytes) -> RecordDict:
    """Return a record with a frame: as an array, for these are what Flower cuts into pieces."""
    array = Array(dtype="uint8", shape=(len(frame),), stype="bytes", data=frame)
    return RecordDict({_FRAME: ArrayRecord({_FRAME: array})})


def _frame_in(content: RecordDict) -> bytes:
    record = content.get(_FRAME)
    array = record.get(_FRAME) if isinstance(record, ArrayRecord) else None
    if array is None:
        raise SocketLostError("a message from Flower has no frame")
    return bytes(array.data)


def _make_reply(message: Message, name: str, word: str) -> Message:
    return Message(RecordDict({name: ConfigRecord({name: word})}), reply_to=message)


def _read_word(content: RecordDict, name: str) -> str:
    record = content.get(name)
    word = record.get(name) if isinstance(record, ConfigRecord) else None
    return word if isinstance(word, str) else ""
