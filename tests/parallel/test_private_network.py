"""The ports of a domain are on private addresses, or no rank listens."""

import socket

import pytest

from phalanx.errors import ConfigError
from phalanx.parallel import RankEnv
from phalanx.parallel.groups.network import address_of, check_private, interface_of, is_private, listen_at, own_address
from phalanx.parallel.groups.rendezvous import _choose_interfaces

ELSEWHERE = RankEnv(rank=0, world=4, local_rank=0, local_world=2)


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.1.2.3", "172.16.0.9", "192.168.7.7", "169.254.1.1", "100.64.3.4", "::1", "fd00::5"]
)
def test_private_addresses_are_let_through(address):
    check_private(address, "MASTER_ADDR", unsafe=False)

    assert is_private(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "172.32.0.1", "100.128.0.1", "2001:4860:4860::8888", "::ffff:8.8.8.8"])
def test_public_ones_are_refused_unless_the_run_file_allows_them(address):
    check_private(address, "MASTER_ADDR", unsafe=True)

    with pytest.raises(ConfigError, match=r"not the address of a private network.*unsafe_public_network = true"):
        check_private(address, "MASTER_ADDR", unsafe=False)


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_every_interface_is_not_a_private_one(address):
    with pytest.raises(ConfigError, match="not the address of a private network"):
        check_private(address, "MASTER_ADDR", unsafe=False)


def test_an_interface_is_found_by_its_address():
    assert interface_of("127.0.0.1") == "lo"
    assert address_of("lo") == "127.0.0.1"
    assert interface_of("203.0.113.77") is None
    assert address_of("no-such-interface") is None
    assert own_address("127.0.0.1") == "127.0.0.1"


def test_rank_0_listens_at_one_address_and_no_other():
    with listen_at("127.0.0.1", "127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]

        assert listener.getsockname()[0] == "127.0.0.1"
        assert [answers(address, port) for address in ("127.0.0.2", "127.0.0.1")] == [False, True]


def answers(address, port):
    with socket.socket() as other:
        other.settimeout(5)
        return other.connect_ex((address, port)) == 0


def test_where_rank_0_cannot_listen_it_says_so():
    with pytest.raises(ConfigError, match=r"cannot listen at 203\.0\.113\.77"):
        listen_at("203.0.113.77", "203.0.113.78", 0)


def test_a_public_master_is_refused_before_anything_listens(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "8.8.8.8")
    monkeypatch.setenv("MASTER_PORT", "29500")

    with pytest.raises(ConfigError, match=r"MASTER_ADDR=8\.8\.8\.8"), _choose_interfaces(ELSEWHERE, unsafe=False):
        pass


def test_several_machines_talk_over_the_interface_that_leads_to_rank_0(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    import os

    with _choose_interfaces(ELSEWHERE, unsafe=False):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
