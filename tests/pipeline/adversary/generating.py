"""Every single act of an insider: each point of a run x each message x each field x each neighbouring value."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from acts import Act, Alter, At, Crash, Lie, Say, Send, Withhold
from liar import PAYLOADS, Point
from neighbours import KINDS, neighbours_of, places
from protocol_page import IDENTITY, LISTENERS, SAYERS

LIES = ("weights", "forward", "backward", "gradient", "claims")
JOINING = ("hello", "setup", "challenge", "measured", "not_let_in", "prepared")
"""Kinds that are said before a party has a role."""
MANY = 300
"""Words at once: more than the owner may keep of any kind, and less than its inbox takes."""
_SAYING = ("assign", "tensor", "audit", "fetch", "fetch_bulk", "apply", "ask")
"""What a party gets when it may say something that was not asked for: once for each sort of message."""


def distinct(points: Iterable[Point]) -> list[Point]:
    """Points without those that differ from others in the microbatch alone: the first and the last of each sort."""
    by_sort: dict[object, list[Point]] = {}
    for point in points:
        by_sort.setdefault((point.at.event, point.at.kind, point.at.step, point.sort), []).append(point)
    return [point for found in by_sort.values() for point in dict.fromkeys((found[0], found[-1]))]


def singles(points: Iterable[Point], parties: tuple[str, ...]) -> Iterator[Act]:
    """Yield every single act of an insider that comes by these points."""
    spoken, heard = set[object](), set[object]()
    for point in distinct(points):
        at = point.at
        if at.event == "sends":
            yield from sent_otherwise(at, parties)
            continue
        yield Act(at, Withhold())
        if at.kind in _SAYING and (at.kind, at.step, point.sort) not in spoken:
            spoken.add((at.kind, at.step, point.sort))
            yield from lies(at)
            for kind in KINDS:
                yield from said(at, kind, parties)
                if (at.event, at.kind, at.step, kind) not in heard:
                    heard.add((at.event, at.kind, at.step, kind))
                    yield from said_otherwise(at, kind, parties)


def sent_otherwise(at: At, parties: tuple[str, ...]) -> Iterator[Act]:
    """Yield what an insider can do about one message that it is about to send, and about all of its kind from there."""
    lasting = replace(at, lasting=True)
    for when in (at, lasting):
        yield Act(when, Withhold())
        for party in ("owner", *parties) if when.lasting else ():
            # from one of them alone
            yield Act(replace(when, nth=0, peer=party), Withhold())
        yield Act(when, Send(when="late"))
        yield Act(when, Send(when="behind"))
        for alter in alters(at.kind):
            yield Act(when, Send((alter,)))
            yield Act(when, Send((alter,), when="behind"))
        for payload in PAYLOADS if at.kind in ("tensor", "bulk", "fetched") else ():
            if payload:
                yield Act(when, Send(payload=payload))
    for alter in alters(at.kind):
        yield Act(at, Send((alter,), when="before"))
    for party in ("owner", *parties):
        yield Act(at, Send(to=party))
        yield Act(at, Send(to=party, when="behind"))


def lies(at: At) -> Iterator[Act]:
    """Yield lies in computations, for one step and for good."""
    for what in LIES:
        for steps in (1, 9):
            yield Act(at, Lie(what, steps))


def said(at: At, kind: str, parties: tuple[str, ...]) -> Iterator[Act]:
    """Yield a message of a kind that was not asked for, and many of them about steps far ahead."""
    for to in _receivers(kind, parties):
        yield Act(at, Say(kind, to=to))
    if LISTENERS[kind] == "owner":
        epoch = Alter(("epoch",), "far")
        yield Act(at, Say(kind, (epoch,), num=MANY))
        for alter in alters(kind):
            if alter.value == "more":
                yield Act(at, Say(kind, (epoch, alter), num=MANY))


def said_otherwise(at: At, kind: str, parties: tuple[str, ...]) -> Iterator[Act]:
    """Yield it with each field altered; what only the owner may say is refused whatever it says."""
    for alter in alters(kind) if SAYERS[kind] == "worker" else [Alter(("epoch",), "ahead"), Alter(("epoch",), "stale")]:
        for to in _receivers(kind, parties):
            yield Act(at, Say(kind, (alter,), to=to))


def said_about_others(at: At, kind: str, parties: tuple[str, ...]) -> Iterator[Act]:
    """Yield it about a neighbouring thing: one field of what tells statements apart, by docs/protocol.md, altered."""
    for alter in alters(kind):
        if alter.path[0] in IDENTITY[kind]:
            for to in _receivers(kind, parties):
                yield Act(at, Say(kind, (alter,), to=to))


def _receivers(kind: str, parties: tuple[str, ...]) -> tuple[str, ...]:
    """Those that listen to a kind; what is for other workers, also the owner, which hands such things on."""
    return ("owner",) if LISTENERS[kind] == "owner" else (parties[-1], "owner")


def alters(kind: str) -> list[Alter]:
    """Every neighbouring value of every field of a kind."""
    return [Alter(place.path, value) for place in places(kind) for value in neighbours_of(place)]


def crashes(points: Iterable[Point]) -> Iterator[Act]:
    """Yield the end of an honest party, at each point."""
    for point in distinct(points):
        if point.at.kind not in JOINING:
            yield Act(point.at, Crash())


def spread(acts: Iterable[Act]) -> list[Act]:
    """The same acts in another order, so that a beginning of them is a cut through all.

    Each family of acts comes once, then each once more; families of few come before those of many, and acts on
    messages before a party has a role last.
    """
    families: dict[object, list[Act]] = {}
    for act in acts:
        at, rank = act.at, _rank(act)
        # what alters no field is little, and is done at every point of the first step
        nth = at.nth if rank == 0 and not at.lasting else None
        families.setdefault((rank, at.event, at.kind, at.lasting, at.peer, nth, act.deed), []).append(act)
    rounds = [families[key] for key in sorted(families, key=lambda key: key[0])]
    order: list[Act] = []
    while rounds:
        order += [found.pop(0) for found in rounds]
        rounds = [found for found in rounds if found]
    return order


def _rank(act: Act) -> int:
    deed = act.deed
    if act.at.kind in JOINING:
        return 9
    if isinstance(deed, (Lie, Withhold)) or (isinstance(deed, Send) and not deed.alters):
        return 0
    if isinstance(deed, Send):
        return 1 if deed.when != "before" else 3
    return 2 if not deed.alters or deed.num > 1 else 4
