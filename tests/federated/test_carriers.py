"""Every carrier keeps the promises of the port: memory, our own transport, the bridge, and the bridge over Flower."""

import shutil
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from bridge_scene import BridgeScene, ForwardingEngine
from flower_scene import FlowerEngine
from loopback_scene import SITES, DeadSiteError, LoopbackScene
from memory_carrier import MemoryCarrier
from rounds_scene import RUN, BookInMemory, Parabola

from phalanx.federated.carriers import bridge, loopback, loopback_site, shim
from phalanx.federated.carriers import messages as m
from phalanx.federated.carriers.carrier import LostSite, SentOrder
from phalanx.federated.config import FederatedConfig
from phalanx.federated.rounds.coordinator import RoundCoordinator
from phalanx.federated.rounds.fleet import Fleet
from phalanx.federated.rounds.journal import RoundJournal
from phalanx.federated.rounds.site import Site
from phalanx.federated.rounds.terms import RunTerms
from phalanx.security.crypto import Identity

IN_PROCESSES = ("loopback", "bridge", "flower")
LONG_S = 30.0


@pytest.fixture
def home():
    # a socket's path is short
    path = Path(tempfile.mkdtemp(prefix="phx-"))
    yield path
    shutil.rmtree(path)


class OverMemory:
    """Sites of this process."""

    def __init__(self, home):
        self.carrier = MemoryCarrier({})

    def begin_phase(self, name, answer, session=None):
        self.carrier.sites[name] = answer

    def kill(self, name):
        self.carrier.sites.pop(name)

    def close(self):
        pass


class OverLoopback:
    """Sites that call over TLS."""

    def __init__(self, home):
        self.scene = LoopbackScene(home)
        self.carrier = self.scene.carrier
        self.threads = {}
        self.ends = Ends()
        self.carrier.watch_processes(self.ends)
        self.killed = threading.Event()

    def begin_phase(self, name, answer, session=None):
        self.killed.clear()
        self.threads[name] = self.scene.call(
            name, answer=dying(answer, self.killed), **({} if session is None else {"session": session})
        )

    def kill(self, name):
        self.killed.set()
        self.ends.dying[name] = self.threads[name]

    def close(self):
        self.scene.close()


class Ends:
    """The word of a supervisor that processes have ended."""

    def __init__(self):
        self.dying = {}

    def restart_ended_sites(self):
        ended = {name: "signal 9" for name, thread in self.dying.items() if not thread.is_alive()}
        self.dying = {name: thread for name, thread in self.dying.items() if name not in ended}
        return ended

    def close(self):
        pass


class OverBridge:
    """Sites at sockets, and an engine between."""

    def __init__(self, home, engine=ForwardingEngine):
        names = ("owner", *SITES)
        identities = {name: Identity.without_certificate(name) for name in names}
        roster = {name: identities[name].public for name in SITES}
        config = FederatedConfig(sites=SITES, max_norm=100.0, deadline_s=LONG_S)
        terms = RunTerms("run-1", RUN, config, 0, identities["owner"].public, roster, 10)
        self.scene = BridgeScene(home, terms, identities, f"{RUN[:16]}-1", engine)
        self.carrier = self.scene.carrier
        self.killed = threading.Event()
        self.ending = {}

    def begin_phase(self, name, answer, session=None):
        if (ending := self.ending.pop(name, None)) is not None:
            # the owner learns of the death before the dying thread has closed its socket; a process that dies
            # closes all at once, and a later one finds none that listens
            ending.join()
        self.killed.clear()
        self.scene.serve(name, dying(answer, self.killed), session)

    def kill(self, name):
        # its process ends in the order after this
        self.killed.set()
        self.ending[name] = self.scene.threads[name]

    def close(self):
        self.scene.close()


class OverFlower(OverBridge):
    """The same, and the engine runs the two ends of our Flower app."""

    def __init__(self, home):
        super().__init__(home, FlowerEngine)


def dying(answer, killed):
    def until_killed(order, payload):
        if killed.is_set():
            raise DeadSiteError
        return answer(order, payload)

    return until_killed


@pytest.fixture
def over(request, home, monkeypatch):
    monkeypatch.setattr(loopback_site, "_LOOK_EVERY_S", 0.2)
    monkeypatch.setattr(loopback, "_END_S", 1.0)
    monkeypatch.setattr(bridge, "_GREET_EVERY_S", 0.05)
    monkeypatch.setattr(bridge, "_LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(bridge, "_END_S", 1.0)
    carriers = {"memory": OverMemory, "loopback": OverLoopback, "bridge": OverBridge, "flower": OverFlower}
    made = carriers[request.param](home)
    yield made
    made.close()


def everywhere(*kinds):
    return pytest.mark.parametrize("over", kinds or ("memory", *IN_PROCESSES), indirect=True)


def await_sites(carrier, *names):
    for _ in range(600):
        if carrier.present_sites() == frozenset(names):
            return
        carrier.collect_reply(0.05)
    raise AssertionError(f"{sorted(carrier.present_sites())} are there")


def measured(ticket, loss=1.0):
    return m.MeasuredReply(ticket=ticket, loss=loss, num_targets=3)


def measure(ticket, payload=b""):
    return SentOrder(m.MeasureOrder(ticket=ticket), payload)


@everywhere()
def test_each_site_gets_its_own_order_and_its_reply_is_of_its_name(over):
    def site(name):
        return lambda order, payload: (measured(order.ticket), bytes(payload)[::-1] + name.encode())

    for name in SITES:
        over.begin_phase(name, site(name))
    await_sites(over.carrier, *SITES)

    for first in (1, 5):
        sent = {name: measure(first + n, f"for {name}".encode()) for n, name in enumerate(SITES)}
        over.carrier.broadcast_orders(sent)
        got = [over.carrier.collect_reply(LONG_S) for _ in SITES]

        assert {one.site: bytes(one.payload) for one in got} == {
            name: f"for {name}".encode()[::-1] + name.encode() for name in SITES
        }
        assert {one.site: one.body["ticket"] for one in got} == {name: one.order.ticket for name, one in sent.items()}
    assert over.carrier.collect_reply(0.0) is None


@everywhere()
def test_a_site_that_goes_in_an_order_is_told_of_and_comes_back_in_a_later_life(over):
    over.begin_phase("north", lambda order, payload: (measured(order.ticket), b""))
    over.begin_phase("south", lambda order, payload: (measured(order.ticket), b""))
    await_sites(over.carrier, "north", "south")

    over.kill("north")
    over.carrier.broadcast_orders({"north": measure(1)})
    lost = over.carrier.collect_reply(LONG_S)
    await_sites(over.carrier, "south")
    over.begin_phase("north", lambda order, payload: (measured(order.ticket), b"again"))
    await_sites(over.carrier, "north", "south")
    over.carrier.broadcast_orders({"north": measure(2), "south": measure(3)})
    got = {one.site: one for one in (over.carrier.collect_reply(LONG_S), over.carrier.collect_reply(LONG_S))}

    assert lost == LostSite("north", "gone")
    assert bytes(got["north"].payload) == b"again" and got["north"].body["ticket"] == 2
    assert got["south"].body["ticket"] == 3


@everywhere()
def test_an_order_to_a_site_that_is_not_there_is_told_of(over):
    over.carrier.broadcast_orders({"north": measure(1)})

    assert over.carrier.collect_reply(LONG_S) == LostSite("north", "gone")


@everywhere(*IN_PROCESSES)
def test_a_late_reply_is_handed_out_when_it_comes_and_holds_up_no_other_site(over):
    free = threading.Event()

    def slow(order, payload):
        free.wait(LONG_S)
        return measured(order.ticket), b"late"

    over.begin_phase("north", slow)
    over.begin_phase("south", lambda order, payload: (measured(order.ticket), b"soon"))
    await_sites(over.carrier, "north", "south")

    over.carrier.broadcast_orders({"north": measure(1), "south": measure(2)})
    first, none = over.carrier.collect_reply(LONG_S), over.carrier.collect_reply(0.0)
    free.set()
    last = over.carrier.collect_reply(LONG_S)

    assert (first.site, bytes(first.payload)) == ("south", b"soon")
    assert none is None
    assert (last.site, last.body["ticket"], bytes(last.payload)) == ("north", 1, b"late")


@everywhere()
def test_a_malformed_reply_is_carried_as_a_claim_and_is_no_answer(over):
    class Odd(m.SiteReply):
        kind = "odd"

    over.begin_phase("north", lambda order, payload: (Odd(ticket=order.ticket), b"x"))
    await_sites(over.carrier, "north")
    fleet = Fleet(over.carrier)

    fleet.ask_sites({"north": measure}, m.MeasuredReply)
    answers = list(fleet.yield_answers(LONG_S))

    assert [(one.site, one.fault) for one in answers] == [("north", "malformed")]


def rounds(home, carrier, identities, trainers):
    """Two rounds of secure sums over a carrier; returns weights."""
    config = FederatedConfig(sites=SITES, max_norm=100.0, deadline_s=LONG_S, secure=True, min_cohort=3)
    roster = {name: identities[name].public for name in SITES}
    terms = RunTerms("run-1", RUN, config, 0, identities["owner"].public, roster, 10)
    sites = {}
    for name in SITES:
        (home / f"{name}-own").mkdir(exist_ok=True)
        sites[name] = Site(identities[name], terms, trainers[name], BookInMemory(), home / f"{name}-own")
    owner = RoundCoordinator(
        terms, identities["owner"], Fleet(carrier), RoundJournal(home / "rounds"), {"w": torch.zeros(2)}
    )
    return sites, owner


@everywhere()
def test_rounds_of_secure_sums_come_to_the_same_over_each_carrier(over, home):
    scene = getattr(over, "scene", None)
    names = ("owner", *SITES)
    identities = {n: Identity.without_certificate(n) for n in names} if scene is None else scene.identities
    trainers = {name: Parabola(torch.tensor([float(n), 1.0])) for n, name in enumerate(SITES)}
    sites, owner = rounds(home, over.carrier, identities, trainers)
    for name, site in sites.items():
        over.begin_phase(name, site.answer_order)
    await_sites(over.carrier, *SITES)

    records = [owner.run_round(number, 0.5) for number in (1, 2)]

    assert all(sorted(record.shares) == sorted(SITES) for record in records)
    # the mean of targets is (1.5, 1), and each round goes half of the way
    torch.testing.assert_close(owner.weights["w"], torch.tensor([1.125, 0.75]), atol=1e-4, rtol=0.0)


def test_the_shim_needs_the_standard_library_alone(tmp_path):
    import subprocess
    import sys

    copied = tmp_path / "shim.py"
    copied.write_text(Path(shim.__file__).read_text())
    # -I and -S: no packages of this environment
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import shim; print(shim.OwnerConnection.__name__)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "OwnerConnection"
