"""The app that Flower runs: what its directory holds, which node a site has, and what a reply without a frame costs."""

import ast
import contextlib
import shutil
import sys
import tempfile
import threading
import tomllib
from pathlib import Path

import pytest
from bridge_scene import BridgeScene
from flower_scene import APP, ConfigRecord, FlowerEngine, Message, RecordDict
from rounds_scene import RUN

from phalanx.errors import ConfigError
from phalanx.federated.carriers import bridge
from phalanx.federated.carriers import messages as m
from phalanx.federated.carriers.carrier import CarriedReply, LostSite, SentOrder
from phalanx.federated.carriers.engine_jobs import write_flower_app
from phalanx.federated.config import FederatedConfig
from phalanx.federated.rounds.terms import RunTerms
from phalanx.security.crypto import Identity

SITES = ("north", "south")
LONG_S = 30.0


@pytest.fixture
def scene(monkeypatch):
    monkeypatch.setattr(bridge, "_GREET_EVERY_S", 0.05)
    monkeypatch.setattr(bridge, "_LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(bridge, "_END_S", 0.5)
    home = Path(tempfile.mkdtemp(prefix="phx-"))
    identities = {name: Identity.without_certificate(name) for name in ("owner", *SITES)}
    roster = {name: identities[name].public for name in SITES}
    terms = RunTerms("run-1", RUN, FederatedConfig(sites=SITES), 0, identities["owner"].public, roster, 10)
    made = BridgeScene(home, terms, identities, f"{RUN[:16]}-1", FlowerEngine)
    for name in SITES:
        made.serve(name, lambda order, payload: (m.MeasuredReply(ticket=order.ticket, loss=1.0, num_targets=3), b""))
    meet(made, *SITES)
    yield made
    made.close()
    shutil.rmtree(home)


def meet(scene, *names):
    for _ in range(600):
        if scene.carrier.present_sites() == frozenset(names):
            return
        scene.carrier.collect_reply(0.05)
    raise AssertionError(scene.said)


def ask(scene, *names):
    scene.carrier.broadcast_orders({name: SentOrder(m.MeasureOrder(ticket=n + 1), b"") for n, name in enumerate(names)})


def scene_reply(reply):
    """A message with the id that this reply answers."""
    asked = Message()
    asked.metadata.message_id = reply.metadata.reply_to_message_id
    return asked


class Failure:
    reason = "the ClientApp raised an exception"


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"frame": ConfigRecord({"frame": b"x"})},
        {"lost": ConfigRecord({"lost": 7})},
        {"lost": ConfigRecord({"lost": "no process"})},
        None,
    ],
)
def test_a_reply_without_a_frame_costs_that_site_the_order_and_no_other(scene, record):
    def touch(reply, node, frame):
        if scene.engine.grid.nodes[node] != "north":
            return reply
        if record is None:
            return Message(error=Failure(), reply_to=scene_reply(reply))
        return Message(RecordDict(record), reply_to=scene_reply(reply))

    honest, scene.engine.grid.tamper = scene.engine.grid.tamper, touch
    ask(scene, *SITES)
    got = [scene.carrier.collect_reply(LONG_S) for _ in SITES]
    scene.engine.grid.tamper = honest
    meet(scene, *SITES)
    ask(scene, "north")

    assert LostSite("north", "gone") in got
    assert [one.site for one in got if isinstance(one, CarriedReply)] == ["south"]
    assert isinstance(scene.carrier.collect_reply(LONG_S), CarriedReply)


def test_replies_that_a_superlink_swaps_between_sites_are_refused(scene):
    held, both = {}, threading.Barrier(len(SITES))

    def swap(reply, node, frame):
        held[node] = reply.content
        # a message that is asked again on a busy machine finds nobody to swap with
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(LONG_S)
        reply.content = next(content for other, content in held.items() if other != node)
        return reply

    scene.engine.grid.tamper = swap
    ask(scene, *SITES)

    found = {scene.carrier.collect_reply(LONG_S) for _ in SITES}
    both.abort()
    assert found == {LostSite(name, "refused") for name in SITES}


def test_a_frame_that_a_superlink_drops_holds_up_that_site_alone(scene):
    honest = scene.engine.grid.tamper
    scene.engine.grid.tamper = lambda reply, node, frame: (
        None if scene.engine.grid.nodes[node] == "north" else honest(reply, node, frame)
    )

    ask(scene, *SITES)

    assert scene.carrier.collect_reply(LONG_S).site == "south"
    assert scene.carrier.collect_reply(0.2) is None


def test_a_node_that_takes_a_sites_name_gets_no_frame_as_long_as_the_first_is_there(scene):
    grid = scene.engine.grid
    # of a lower number than the node that was there first
    grid.nodes[3] = "north"
    ask(scene, *SITES)
    for _ in range(600):
        if any(one.metadata.node == 3 and one.metadata.kind == "query" for one in grid.asked):
            break
        scene.carrier.collect_reply(0.05)
    meet(scene, *SITES)
    ask(scene, *SITES)
    scene.carrier.collect_reply(LONG_S)

    def taken():
        return any(one.metadata.node == 3 and one.metadata.kind == "train" for one in grid.asked)

    assert not taken()
    del grid.nodes[7]
    for _ in range(600):
        if taken():
            break
        meet(scene, *SITES)
        ask(scene, "north")
        scene.carrier.collect_reply(LONG_S)
    assert taken()


@pytest.mark.parametrize("answer", ["junk", "nothing", "another", "lost"])
def test_a_node_that_has_a_sites_name_first_keeps_the_site_out_no_longer_than_a_greeting(scene, monkeypatch, answer):
    # the time of an honest answer as well, which a busy machine needs some of
    monkeypatch.setattr(bridge, "_GREETING_S", 3.0)
    grid, honest = scene.engine.grid, scene.engine.grid.tamper
    squatter, true = 3, 7

    def squat(reply, node, frame):
        if node != squatter:
            return honest(reply, node, frame)
        if answer == "nothing":
            return None
        if answer == "lost":
            return Message(RecordDict({"lost": ConfigRecord({"lost": "no"})}), reply_to=scene_reply(reply))
        other = scene.engine.frames["south"][0] if answer == "another" else b"PHLX" * 40
        # made anew: the site that it asked may have ended with the test, and has no answer
        return Message(APP._pack_frame(other), reply_to=scene_reply(reply))

    grid.tamper = squat
    del grid.nodes[true]
    grid.nodes[squatter] = "north"
    meet(scene, "south")
    for _ in range(600):
        if any(one.metadata.node == squatter and one.metadata.kind == "train" for one in grid.asked):
            break
        scene.carrier.collect_reply(0.05)
    grid.nodes[true] = "north"

    meet(scene, *SITES)
    asked = len(grid.asked)
    for _ in range(3):
        ask(scene, *SITES)
        assert {scene.carrier.collect_reply(LONG_S).site for _ in SITES} == {*SITES}

    assert not any(one.metadata.node == squatter and one.metadata.kind == "train" for one in grid.asked[asked:])


@pytest.mark.parametrize("name", [pytest.param("x" * 2**21, id="megabytes"), pytest.param("north\nsouth", id="lines")])
def test_a_node_with_a_name_that_no_site_has_disturbs_no_other_one(scene, name):
    scene.engine.grid.nodes[3] = name
    for _ in range(600):
        if scene.engine.named(3):
            break
        scene.carrier.collect_reply(0.05)
    assert scene.engine.named(3)

    meet(scene, *SITES)
    ask(scene, *SITES)

    assert all(isinstance(scene.carrier.collect_reply(LONG_S), CarriedReply) for _ in SITES)


def test_the_app_names_both_ends_and_needs_the_standard_library_and_flower_alone(tmp_path):
    write_flower_app(tmp_path / "app", Path('/srv/a "b"\\c/ä.sock'), "~/{site}/s")

    read = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text("utf-8"))
    settings = read["tool"]["flwr"]["app"]
    assert settings["config"] == {"owner-socket": '/srv/a "b"\\c/ä.sock', "site-socket": "~/{site}/s"}
    assert read["project"]["dependencies"] == []
    for reference in settings["components"].values():
        module, name = reference.split(":")
        tree = ast.parse((tmp_path / "app" / f"{module.replace('.', '/')}.py").read_text())
        plain = [
            node.targets[0].id
            for node in tree.body
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
        ]
        assert name in plain
    imported = set()
    for file in (tmp_path / "app" / "phalanx_carrier").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {one.name.split(".")[0] for one in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(node.module.split(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"flwr"}
    with pytest.raises(ConfigError, match="choose a new directory"):
        write_flower_app(tmp_path / "app", Path("/o"), "/s")
