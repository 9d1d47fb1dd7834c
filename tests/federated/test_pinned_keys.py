"""A secure sum hides a site among keys that it knows: an owner that is the authority plays all, unless pinned."""

import subprocess
import sys

import pytest
import torch
from memory_carrier import MemoryCarrier
from rounds_scene import BookInMemory, Parabola

from phalanx.errors import CertificateError, ConfigError
from phalanx.federated.rounds.coordinator import RoundCoordinator
from phalanx.federated.rounds.fleet import Fleet
from phalanx.federated.rounds.journal import RoundJournal
from phalanx.federated.rounds.site import Site
from phalanx.security.crypto import create_authority, issue_certificate, load_identity
from phalanx.train.sessions.site_file import read_site, terms_of
from tiny_run_file import tiny_run_file

OTHERS = ("south", "east")
SECTION = (
    '[federated]\nsites = ["north", "south", "east"]\nmin_cohort = 3\nsecure = true\ncarrier = "bridge"\npki = "p"\n'
)
SECRET = torch.tensor([0.5, -0.25, 0.125])
"""What north has learned, and no other party may see."""


class Place:
    """Keys of all parties, the certificates that the owner has given to north, and north's file."""

    def __init__(self, home) -> None:
        self.home, self.keys = home, home / "keys"
        create_authority(self.keys)
        for name in ("owner", "north", *OTHERS):
            issue_certificate(self.keys, name)
        self.write()

    def summary_fields(self, *names: str) -> dict[str, str]:
        """What sites say of their own keys, by telephone."""
        return {name: load_identity(self.keys / name).public.public_key.hex() for name in names}

    def write(self, keys: dict[str, str] | None = None, section: str = SECTION) -> None:
        (self.home / "run.toml").write_text(tiny_run_file(section))
        words = {"run": self.home / "run.toml", "identity": self.keys / "north", "socket": self.home / "s"}
        words["certificates"] = self.keys
        lines = [f'{name} = "{value}"' for name, value in words.items()]
        pinned = ["[keys]", *(f'{name} = "{key}"' for name, key in keys.items())] if keys is not None else []
        (self.home / "north.toml").write_text("\n".join([*lines, *pinned]) + "\n")

    def substitute(self) -> None:
        """The owner, being the authority, certifies keys of its own in the others' names."""
        for name in OTHERS:
            (self.keys / name).rename(self.home / f"real-{name}")
            issue_certificate(self.keys, name)

    def begin(self):
        """North reads its file, its run and the certificates, as `phalanx site` does."""
        file, run, identity = read_site(self.home / "north.toml")
        return identity, terms_of(run, identity, self.keys, file.keys)


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def what_the_owner_reads(place) -> torch.Tensor:
    """A round of north and two puppets of the owner, which bring updates of zeros."""
    north, terms = place.begin()
    sites = {}
    for name in ("north", *OTHERS):
        identity = north if name == "north" else load_identity(place.keys / name)
        trainer = Parabola(SECRET if name == "north" else torch.zeros(3))
        (place.home / f"own-{name}").mkdir()
        sites[name] = Site(identity, terms, trainer, BookInMemory(), place.home / f"own-{name}").answer_order
    fleet, journal = Fleet(MemoryCarrier(sites)), RoundJournal(place.home / "journal")
    owner = RoundCoordinator(terms, load_identity(place.keys / "owner"), fleet, journal, {"w": torch.zeros(3)}, None)
    record = owner.run_round(1, 1.0)
    assert len(record.shares) == 3
    return 3 * owner.weights["w"]


def test_an_owner_that_is_the_authority_reads_one_sites_update_behind_a_secure_sum_where_keys_are_not_pinned(place):
    place.substitute()

    # the attacker wins: all of the sum but one update is its own
    torch.testing.assert_close(what_the_owner_reads(place), SECRET, rtol=0, atol=1e-5)


def test_a_key_that_the_owner_has_put_in_anothers_place_is_refused_where_it_is_pinned(place):
    place.write(place.summary_fields(*OTHERS))
    place.substitute()

    with pytest.raises(
        CertificateError, match=r"south/certificate.pem: certifies the message key .* ask 'south'"
    ) as said:
        place.begin()
    assert said.value.error_facts["code"] == "PHX-V014"


@pytest.mark.parametrize("names", [OTHERS, ("owner", "north", *OTHERS)])
def test_keys_that_certificates_have_are_taken_and_may_be_of_all_parties(place, names):
    place.write(place.summary_fields(*names))

    identity, terms = place.begin()

    assert identity.name == "north"
    assert {name: peer.public_key.hex() for name, peer in terms.roster.items()} == place.summary_fields(
        "north", *OTHERS
    )


@pytest.mark.parametrize("name", ["owner", "north"])
def test_another_key_of_the_owner_or_of_the_site_itself_is_refused_too(place, name):
    place.write(place.summary_fields("owner", "north", *OTHERS) | {name: "ab" * 32})

    with pytest.raises(CertificateError, match=f"{name}/certificate.pem: certifies"):
        place.begin()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"south": "ab" * 32}, "keys lacks east, which are sites of .*; ask each"),
        ({"south": "ab" * 32, "east": "ab" * 32, "west": "ab" * 32}, "keys has west, which are not sites of"),
        ({"south": "ab" * 31, "east": "ab" * 32}, "keys.south"),
        ({"south": "AB" * 32, "east": "ab" * 32}, "keys.south"),
    ],
)
def test_sites_that_nobody_has_spoken_to_and_keys_that_are_none_are_refused(place, keys, words):
    place.write(keys)

    with pytest.raises(ConfigError, match=words):
        read_site(place.home / "north.toml")


def test_a_site_that_the_owner_has_made_up_is_refused(place):
    place.write(place.summary_fields(*OTHERS), SECTION.replace('"east"', '"east", "puppet"'))

    with pytest.raises(ConfigError, match="keys lacks puppet"):
        read_site(place.home / "north.toml")


def test_a_mistake_in_a_sites_file_is_told_without_torch(place):
    place.write({"south": "ab" * 32})
    program = (
        "import sys\nfrom pathlib import Path\nfrom phalanx.train.sessions.site_file import read_site\n"
        "from phalanx.errors import ConfigError\n"
        "try:\n    read_site(Path(sys.argv[1]))\n"
        "except ConfigError:\n    sys.exit(9 if 'torch' in sys.modules else 0)\n"
        "sys.exit(8)\n"
    )

    done = subprocess.run([sys.executable, "-c", program, str(place.home / "north.toml")], check=False)

    assert done.returncode == 0
