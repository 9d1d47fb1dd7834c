"""Keys: who is let in, and what becomes of a file that somebody else has changed."""

import json
import multiprocessing
import shutil
from datetime import timedelta

import pytest

from access_keys import make_terms
from phalanx.config import canonical_json
from phalanx.errors import CertificateError, KeyFileError
from phalanx.security.crypto import Identity, in_domain
from phalanx.serve.access import KeyStore
from phalanx.serve.access.key_file import KeyFile, read_key_file, write_key_file


def test_a_key_lets_its_owner_in_and_no_file_holds_its_secret(keys):
    key_id, secret = keys.make(models=("small",), role="operator", may_skip_mark=True)

    caller = keys.store.find_caller(secret, "127.0.0.1")

    assert (caller.key_id, caller.owner, caller.role, caller.may_skip_mark) == (key_id, "alice", "operator", True)
    assert caller.allows_model("small")
    assert not caller.allows_model("large")
    random_part = secret.rpartition("_")[2]
    for path in keys.directory.rglob("*"):
        assert path.is_dir() or random_part.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("change", ["", " ", "x", "\n", "A", "\u00e9", "\0", "." * 5000])
def test_a_secret_with_one_more_character_lets_nobody_in(keys, change):
    _, secret = keys.make()

    assert change == "" or keys.store.find_caller(secret + change, "127.0.0.1") is None
    assert change == "" or keys.store.find_caller(change + secret, "127.0.0.1") is None
    assert keys.store.find_caller(secret[:-1], "127.0.0.1") is None


def test_every_character_of_a_secret_counts(keys):
    _, secret = keys.make()

    for place in range(len(secret)):
        other = "b" if secret[place] == "a" else "a"
        assert keys.store.find_caller(secret[:place] + other + secret[place + 1 :], "127.0.0.1") is None


def test_the_secret_of_one_key_under_the_id_of_another_lets_nobody_in(keys):
    (first_id, first), (second_id, _) = keys.make(), keys.make("bob")

    assert keys.store.find_caller(first.replace(first_id, second_id), "127.0.0.1") is None


def test_expired_and_revoked_keys_let_nobody_in(keys):
    _, expired = keys.make(lasts=timedelta(seconds=-1))
    revoked_id, revoked = keys.make()
    assert keys.store.find_caller(revoked, "127.0.0.1")

    keys.store.revoke_key(revoked_id)

    assert keys.store.find_caller(expired, "127.0.0.1") is None
    assert keys.store.find_caller(revoked, "127.0.0.1") is None
    assert not keys.store.is_active(revoked_id)
    assert [record.key_id for record in keys.store.list_keys() if record.revoked] == [revoked_id]


def test_revoking_twice_keeps_the_first_time(keys):
    key_id, _ = keys.make()

    assert keys.store.revoke_key(key_id) == keys.store.revoke_key(key_id)
    with pytest.raises(KeyFileError, match="holds no key"):
        keys.store.revoke_key("a" * 12)


@pytest.mark.parametrize(
    ("address", "is_let_in"),
    [
        ("10.1.2.3", True),
        ("::ffff:10.1.2.3", True),
        ("10.2.0.1", False),
        ("::ffff:10.2.0.1", False),
        ("2001:db8::1", True),
        ("2001:db9::1", False),
        ("", False),
        ("10.1.2.3, 8.8.8.8", False),
        ("localhost", False),
    ],
)
def test_a_key_is_good_from_its_networks_alone(keys, address, is_let_in):
    _, secret = keys.make(networks=("10.1.0.0/16", "2001:db8::/32"))

    assert (keys.store.find_caller(secret, address) is not None) is is_let_in


@pytest.mark.parametrize("networks", [("10.0.0.1/8",), ("here",), ("",)])
def test_what_is_no_network_makes_no_key(networks):
    with pytest.raises(ValueError, match="networks"):
        make_terms(networks=networks)


def test_a_running_store_sees_a_key_that_another_one_made_or_revoked(keys):
    server = KeyStore.open(keys.directory)

    key_id, secret = keys.make()
    assert server.find_caller(secret, "127.0.0.1").key_id == key_id

    keys.store.revoke_key(key_id)
    assert server.find_caller(secret, "127.0.0.1") is None


def change_role(data: bytes) -> bytes:
    return data.replace(b'"role":"user"', b'"role":"operator"')


def sign_by_another(data: bytes) -> bytes:
    statement = json.loads(data)["statement"]
    mallory = Identity.without_certificate("operator")
    signature = mallory.sign_data(in_domain("api-keys/1", canonical_json(statement))).hex()
    return canonical_json({"signature": signature, "statement": statement})


def sign_for_another_purpose(data: bytes) -> bytes:
    return canonical_json({"signature": "00" * 64, "statement": json.loads(data)["statement"]})


CHANGES = {
    "role": change_role,
    "another signer": sign_by_another,
    "no signature": sign_for_another_purpose,
    "spaces": lambda data: data.replace(b":", b": ", 1),
    "cut": lambda data: data[:-1],
    "empty": lambda data: b"",
    "two statements": lambda data: data[:-1] + b',"statement":{}}',
    "further key": lambda data: data[:-1] + b',"x":1}',
    "not JSON": lambda data: b"\xff" + data,
    "list": lambda data: b"[" + data + b"]",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_that_somebody_else_changed_lets_nobody_in_until_it_is_put_back(keys, change):
    key_id, secret = keys.make()
    server = KeyStore.open(keys.directory)
    path = keys.directory / "keys.json"
    honest = path.read_bytes()
    assert change(honest) != honest

    path.write_bytes(change(honest))

    assert server.find_caller(secret, "127.0.0.1") is None
    assert not server.is_active(key_id)
    assert server.limits_of(key_id).concurrency == 0
    assert "keys.json" in server.fault
    with pytest.raises(KeyFileError, match=r"keys\.json"):
        KeyStore.open(keys.directory)
    with pytest.raises(KeyFileError, match=r"keys\.json"):
        keys.make()
    path.write_bytes(honest)
    assert server.find_caller(secret, "127.0.0.1").key_id == key_id
    assert server.fault is None


def test_a_file_that_is_gone_lets_nobody_in(keys):
    _, secret = keys.make()
    (keys.directory / "keys.json").unlink()

    assert keys.store.find_caller(secret, "127.0.0.1") is None
    with pytest.raises(KeyFileError, match="cannot be read"):
        KeyStore.open(keys.directory)


def test_an_older_file_of_the_operator_does_not_bring_a_revoked_key_back(keys):
    key_id, secret = keys.make()
    path = keys.directory / "keys.json"
    older = path.read_bytes()
    keys.store.revoke_key(key_id)
    server = KeyStore.open(keys.directory)

    path.write_bytes(older)

    assert server.find_caller(secret, "127.0.0.1") is None
    with pytest.raises(KeyFileError, match="was read before"):
        KeyStore.open(keys.directory)


def test_a_pinned_operator_is_not_exchanged_together_with_the_file(keys, tmp_path):
    pinned = KeyStore.open(keys.directory)._operator
    mallory = KeyStore.create(tmp_path / "mallory")
    mallory.create_key(make_terms("mallory", role="operator"))
    for name in ("keys.json", "operator.json"):
        shutil.copy(tmp_path / "mallory" / name, keys.directory / name)

    with pytest.raises(KeyFileError, match="is not the file that operator signed"):
        KeyStore.open(keys.directory, operator=pinned)


def test_without_the_operators_key_nobody_makes_keys(keys):
    shutil.rmtree(keys.directory / "operator")
    server = KeyStore.open(keys.directory)

    with pytest.raises(CertificateError, match=r"signing\.key"):
        server.create_key(make_terms())


def test_an_operators_key_of_another_directory_signs_nothing_here(keys, tmp_path):
    KeyStore.create(tmp_path / "other")

    with pytest.raises(CertificateError, match="is not the one whose public half"):
        KeyStore.open(keys.directory, operator_home=tmp_path / "other" / "operator").create_key(make_terms())


def test_a_key_that_is_in_the_file_twice_is_refused(keys):
    keys.make()
    path = keys.directory / "keys.json"
    operator = keys.store._load_operator()
    record = read_key_file(path, operator.public).keys[0]
    write_key_file(path, operator, KeyFile(sequence=9, keys=(record, record)))

    with pytest.raises(KeyFileError, match="holds one key twice"):
        KeyStore.open(keys.directory)


def _make_keys(directory, count: int) -> None:
    for _ in range(count):
        KeyStore.open(directory).create_key(make_terms())


def test_processes_that_make_keys_at_the_same_time_lose_none(keys):
    context = multiprocessing.get_context("fork")
    makers = [context.Process(target=_make_keys, args=(keys.directory, 10)) for _ in range(4)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()

    assert [maker.exitcode for maker in makers] == [0] * 4
    assert len(KeyStore.open(keys.directory).list_keys()) == 40


def test_the_look_up_of_a_key_touches_one_record_however_many_there_are(keys, monkeypatch):
    secrets = [keys.make(f"owner-{number}")[1] for number in range(20)]
    calls = []
    from phalanx.serve.access import key_store

    original = key_store.secret_digest
    monkeypatch.setattr(key_store, "secret_digest", lambda *texts: calls.append(texts) or original(*texts))

    for secret in (secrets[0], secrets[-1], secrets[0][:-1] + "7", "phx_unknown", ""):
        keys.store.find_caller(secret, "127.0.0.1")

    assert len(calls) == 5, "one digest for each secret, right or wrong, known or unknown"
