"""Strategies: any schedule, its parts read off the schemas and off the companies."""

from changes import PAYLOADS
from hypothesis import strategies as st
from kinds import FROM_WORKERS, KINDS, NAMES, changes, places
from play import COMPANIES, NUM_STEPS
from schedule import Act, Again, Alter, Drop, Hold, Liar, On, Payload, Redirect, Repeat, Say, Schedule

from phalanx.lab.attacks import ATTACKS
from phalanx.lab.bench.detection.cells import needs_two
from phalanx.pipeline.protocol.messages import PassedOnHeader

OFTEN = ["tensor", "bulk", "commit", "gradient_held", "applied", "audit_report", "step_audited", "ready", "fetched"]
"""What a worker sends in every run; the rest it sends now and then."""

SENT = st.sampled_from([*OFTEN, *OFTEN, *FROM_WORKERS])
SHOWN = {kind: [place for place in places(kind) if place.type is PassedOnHeader] for kind in OFTEN}
SHOWING = st.sampled_from(sorted(kind for kind in OFTEN if SHOWN[kind]))
"""What passes on headers that others have signed: where an insider speaks in the name of others."""


def alterations(kind):
    """Another value in any place of a message."""
    fields = {}
    for place in places(kind):
        fields.setdefault(place.path[0], []).append(place)
    # every field as often as any other, however much is in it; what others have signed more often
    drawn = [st.sampled_from(found).flatmap(_altered) for found in fields.values()]
    shown = [place for place in places(kind) if place.type is PassedOnHeader]
    return st.one_of(drawn + 3 * [st.sampled_from(shown).flatmap(_altered)] if shown else drawn)


def _altered(place):
    return st.builds(Alter, st.just(place.path), changes(place.type))


def triggers(kind):
    return st.builds(On, st.just(kind), st.none() | st.integers(0, NUM_STEPS - 1), st.integers(0, 2), st.booleans())


@st.composite
def says(draw):
    """A message that was not asked for."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    altered = draw(st.lists(alterations(kind), max_size=4))
    return Say(kind, draw(st.sampled_from(NAMES[:5])), tuple(altered), draw(st.sampled_from([0, 4, 1024])))


@st.composite
def words_of_others(draw):
    """Another header in the place of one that another party has signed."""
    kind = draw(SHOWING)
    # most of these are sent once in a step, so that a later one of a step is none
    when = On(kind, draw(st.none() | st.integers(0, NUM_STEPS - 1)), draw(st.integers(0, 1)), draw(st.booleans()))
    return Act(when, draw(st.sampled_from(SHOWN[kind]).flatmap(_altered)))


@st.composite
def acts(draw):
    """One thing that an insider does."""
    kind = draw(SENT)
    deed = draw(
        alterations(kind)
        | alterations(kind)
        | alterations(kind)
        | says()
        | st.builds(Payload, st.sampled_from(sorted(PAYLOADS)))
        | st.builds(Again, SENT, st.integers(0, 5), st.booleans())
        | st.builds(Redirect, st.sampled_from(NAMES[:5]))
        | st.builds(Repeat, st.sampled_from([1, 2, 50]))
        | st.builds(Hold, st.sampled_from([1, 3, 10]))
        | st.just(Drop())
    )
    return Act(draw(triggers(kind)), deed)


ALONE = sorted(kind for kind in ATTACKS if kind != "stall" and not needs_two(kind))
TOGETHER = sorted(ATTACKS.keys() - {"stall"})
"""A stall would block in real time."""


def liars(most_acts=4, *, together=False):
    """What it computes is the truth three times out of four; some lies need two stages in other hands.

    One in three does nothing but pass on other headers: any other lie would have it convicted before these are told.
    """
    any_acts = st.lists(acts(), max_size=most_acts)
    done = any_acts | any_acts | st.lists(words_of_others(), min_size=1, max_size=2)
    lies = st.integers(0, 3).flatmap(lambda n: st.sampled_from(["none"] if n else TOGETHER if together else ALONE))
    return st.builds(Liar, done.map(tuple), lies, st.integers(0, NUM_STEPS - 1))


@st.composite
def schedules(draw, companies=tuple(COMPANIES)):
    """Any schedule for one of these companies."""
    name = draw(st.sampled_from(companies))
    company = COMPANIES[name]
    numbers = st.integers(1, company.num_workers)
    chosen = draw(st.sets(numbers, min_size=1, max_size=company.most_liars))
    return Schedule(
        name,
        {number: draw(liars(together=company.stages > 3)) for number in sorted(chosen)},
        draw(events(company)),
        draw(st.integers(0, 2**16)),
    )


def events(company):
    late = [(step, "join", company.num_workers + 1) for step in range(NUM_STEPS)] if company.late else []
    return st.lists(st.sampled_from(late), max_size=1).map(tuple) if late else st.just(())
