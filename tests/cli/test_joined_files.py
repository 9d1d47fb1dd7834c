"""A later join changes the keys that were given in a TOML file, and nothing else of it."""

import tomllib

import pytest

from phalanx.cli.parties.joined import change_file
from phalanx.errors import ConfigError

WORKER = """identity = "/home/alice"
owner = "owner.example.org:7070"
advertise = "alice"  # as others reach it

# chosen by hand
threads = 2

[transport]
bind = "0.0.0.0"
port = 7070
keepalive_s = 1.0

[parallel]
port = 1
"""


@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [
        ({"advertise": "alice.example.org"}, "advertise", "alice.example.org"),
        ({"transport.port": 7171}, "transport.port", 7171),
        ({"owner": 'quoted " and \\ back'}, "owner", 'quoted " and \\ back'),
        ({"journal": "/new"}, "journal", "/new"),
        ({"transport.host": "::"}, "transport.host", "::"),
        ({"other.port": 3}, "other.port", 3),
        ({"threads": None}, "threads", None),
    ],
)
def test_one_key_is_set_and_all_others_stay(tmp_path, settings, key, value):
    path = tmp_path / "worker.toml"
    path.write_text(WORKER)

    (line,) = change_file(path, settings)

    expected = tomllib.loads(WORKER)
    *tables, last = key.split(".")
    table = expected
    for name in tables:
        table = table.setdefault(name, {})
    table.pop(last, None)
    if value is not None:
        table[last] = value
    assert tomllib.loads(path.read_text()) == expected
    assert str(path) in line and key in line
    assert key == "other.port" or "# chosen by hand" in path.read_text()


def test_what_is_so_already_is_no_change(tmp_path):
    path = tmp_path / "worker.toml"
    path.write_text(WORKER)

    assert change_file(path, {"advertise": "alice", "transport.port": 7070, "journal": None}) == []
    assert path.read_text() == WORKER


def test_a_value_of_several_lines_is_replaced_whole(tmp_path):
    path = tmp_path / "client.toml"
    path.write_text('train = """\na\nb"""\ntest = "t"\n')

    change_file(path, {"train": "new"})

    assert tomllib.loads(path.read_text()) == {"train": "new", "test": "t"}


def test_a_file_that_is_no_toml_is_named(tmp_path):
    path = tmp_path / "client.toml"
    path.write_text("train = \n")

    with pytest.raises(ConfigError, match=f"{path}: is not valid TOML"):
        change_file(path, {"train": "new"})
