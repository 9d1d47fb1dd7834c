"""Sessions and links: what a browser holds is good for less, and for less long, than the key."""

from datetime import timedelta

import pytest

from phalanx.serve.access.page_sessions import LINK_S, MAX_SESSIONS, SESSION_S, PageSessions

ADDRESS = "127.0.0.1"


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def sessions(clock):
    return PageSessions(clock)


def test_a_link_is_good_for_one_request(sessions):
    link = sessions.make_link("key")

    assert sessions.find_key(link + "0") is None
    assert sessions.find_key(link[:-1]) is None
    assert sessions.find_key(link) == ("key", "")
    assert sessions.find_key(link) is None


def test_a_session_is_good_for_many(sessions):
    secret = sessions.open_session("key")

    key_id, name = sessions.find_key(secret)

    assert [sessions.find_key(secret) for _ in range(3)] == [(key_id, name)] * 3
    assert key_id == "key"
    assert name not in secret
    assert secret not in repr(vars(sessions))


@pytest.mark.parametrize(("make", "lasts_s"), [("make_link", LINK_S), ("open_session", SESSION_S)])
def test_both_end_by_the_clock(sessions, clock, make, lasts_s):
    early, late = getattr(sessions, make)("key"), getattr(sessions, make)("key")

    clock.now_s += lasts_s - 1
    assert sessions.find_key(early) is not None
    clock.now_s += 1
    assert sessions.find_key(late) is None


def test_a_further_session_ends_the_oldest_of_the_same_key(sessions):
    other = sessions.open_session("other")
    secrets = [sessions.open_session("key") for _ in range(MAX_SESSIONS + 1)]

    assert [secret for secret in secrets if sessions.find_key(secret) is None] == secrets[:1]
    assert sessions.find_key(other)[0] == "other"


def test_a_session_that_is_ended_is_over_and_no_other_one(sessions, clock):
    secret, other = sessions.open_session("key"), sessions.open_session("key")
    name, other_name = (sessions.find_key(text)[1] for text in (secret, other))

    sessions.end_session(name)
    sessions.end_session(name)

    assert sessions.find_key(secret) is None
    assert [sessions.is_open(name), sessions.is_open(other_name)] == [False, True]
    clock.now_s += SESSION_S
    assert not sessions.is_open(other_name)


def test_a_session_has_the_rights_of_its_key_and_never_those_of_an_operator(keys):
    key_id, secret = keys.make(role="operator", models=("small",), networks=("127.0.0.0/8",))
    session = keys.store.sessions.open_session(key_id)

    caller = keys.store.find_caller(session, ADDRESS)

    assert keys.store.find_caller(secret, ADDRESS).role == "operator"
    assert (caller.role, caller.key_id, caller.owner) == ("user", key_id, "alice")
    assert caller.session
    assert caller.models == {"small"}
    assert keys.store.find_caller(session, "10.0.0.1") is None


def test_a_revoked_key_ends_its_sessions_and_links(keys):
    key_id, _ = keys.make()
    session, link = keys.store.sessions.open_session(key_id), keys.store.sessions.make_link(key_id)
    assert keys.store.find_caller(session, ADDRESS) is not None

    keys.store.revoke_key(key_id)

    assert keys.store.find_caller(session, ADDRESS) is None
    assert keys.store.find_caller(link, ADDRESS) is None


def test_an_expired_key_ends_its_sessions(keys):
    key_id, _ = keys.make(lasts=timedelta(seconds=-1))

    assert keys.store.find_caller(keys.store.sessions.open_session(key_id), ADDRESS) is None


def test_sessions_end_with_the_server(keys):
    key_id, _ = keys.make()
    session = keys.store.sessions.open_session(key_id)

    assert type(keys.store).open(keys.directory).find_caller(session, ADDRESS) is None
    random_part = session.removeprefix("phs_")
    assert all(random_part.encode() not in path.read_bytes() for path in keys.directory.rglob("*") if path.is_file())
