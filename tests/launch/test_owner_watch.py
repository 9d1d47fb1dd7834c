"""An owner is watched in one way, whichever engine keeps it: asked to end once, killed at the second word."""

import signal
from types import SimpleNamespace

import pytest

from phalanx.launch.worker_slot import watch_owner


class Owner:
    """Ends with one code after the other, each after so many looks."""

    def __init__(self, *codes, looks=1):
        self.codes, self.looks = list(codes), looks
        self.begun, self.said, self.left = 0, [], 0

    @property
    def listen_address(self):
        return f"here:{self.begun}"

    def start_process(self):
        self.begun += 1
        self.left = self.looks

    def poll(self):
        if "killed" in self.said:
            return -signal.SIGKILL
        self.left -= 1
        return None if self.left >= 0 else self.codes[self.begun - 1]

    def ask_to_end(self):
        self.said.append("asked")

    def kill(self):
        self.said.append("killed")


def watched(owner, *, notice=0, **options):
    seen, renewed = [], []
    told = SimpleNamespace(notice_count=notice)
    code = watch_owner(owner, told, seen.append, renew=lambda: renewed.append(True), **options)
    return code, seen, len(renewed)


def test_whoever_looks_sees_where_each_start_listens():
    code, seen, renewed = watched(Owner(-signal.SIGKILL, 0), restarts=3)

    assert (code, renewed) == (0, 1)
    assert seen == ["here:1", "here:2", "here:2"]


@pytest.mark.parametrize("code", [0, 2, 3, 5, 6])
def test_what_would_end_so_again_is_not_started_again(code):
    owner = Owner(code, 0)

    assert watched(owner, restarts=3)[0] == code
    assert owner.begun == 1


@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_it_is_started_again_only_so_often(restarts):
    owner = Owner(1, 1, 1, 1, looks=0)

    assert watched(owner, restarts=restarts)[0] == 1
    assert owner.begun == 1 + restarts


def test_after_a_notice_it_is_asked_once_and_not_started_again():
    owner = Owner(130, -signal.SIGTERM, looks=3)

    assert watched(owner, notice=1, restarts=3)[0] == 130
    assert (owner.said, owner.begun) == (["asked"], 1)


def test_the_second_notice_kills_it():
    owner = Owner(0, looks=50)

    assert watched(owner, notice=2)[0] == -signal.SIGKILL
    assert owner.said == ["asked", "killed"]
