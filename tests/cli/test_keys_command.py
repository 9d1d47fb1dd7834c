"""``phalanx keys``: made once, shown once, taken back, counted."""

import json
import re
from pathlib import Path

import pytest

from phalanx.cli import run_command
from phalanx.serve.access import Access, KeyStore, RequestFacts, RequestTexts


@pytest.fixture
def access(tmp_path: Path) -> Path:
    return tmp_path / "access"


def ask(capsys, *words) -> tuple[int, dict]:
    code = run_command(["keys", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def make(capsys, access, *words, owner="alice") -> dict:
    code, facts = ask(capsys, "create", "--owner", owner, "--access", access, *words)
    assert code == 0, facts
    return facts


def test_a_directory_that_cannot_be_made_is_named(capsys, tmp_path):
    (tmp_path / "file").touch()

    code, answer = ask(capsys, "create", "--owner", "alice", "--access", tmp_path / "file" / "access")

    assert code == 2
    assert answer["error"]["message"].endswith("file/access: cannot be made (Not a directory); give another --access")


def test_a_secret_is_printed_once_and_held_nowhere(capsys, access):
    assert run_command(["keys", "create", "--owner", "alice", "--access", str(access)]) == 0
    printed = capsys.readouterr()
    (secret,) = re.findall(r"phx_[a-z2-7]{12}_[a-z2-7]{52}", printed.out)

    assert secret not in printed.err
    assert KeyStore.open(access).find_caller(secret, "127.0.0.1").owner == "alice"
    assert not any(secret[20:].encode() in path.read_bytes() for path in access.rglob("*") if path.is_file())
    for words in (["list"], ["usage"]):
        assert run_command(["keys", *words, "--access", str(access)]) == 0
        assert secret[20:40] not in capsys.readouterr().out


def test_json_has_the_secret_and_stderr_has_not(capsys, access):
    code = run_command(["keys", "create", "--owner", "alice", "--access", str(access), "--json"])
    printed = capsys.readouterr()

    assert code == 0
    assert json.loads(printed.out)["secret"].startswith("phx_")
    assert "phx_" not in printed.err


def test_a_secret_goes_into_a_new_file_of_its_owner(capsys, access, tmp_path):
    file = tmp_path / "alice.key"
    facts = make(capsys, access, "--secret-file", file)

    assert "secret" not in facts
    assert file.stat().st_mode & 0o777 == 0o600
    assert KeyStore.open(access).find_caller(file.read_text().strip(), "")
    code, facts = ask(capsys, "create", "--owner", "bob", "--access", access, "--secret-file", file)
    assert code == 5
    assert "exists already" in facts["error"]["message"]


def test_terms_are_those_of_the_options(capsys, access):
    words = ["--role", "operator", "--model", "a", "--model", "b", "--network", "10.0.0.0/8", "--days", "2"]
    make(capsys, access, *words, "--tokens-per-month", "5", "--concurrency", "0", "--may-skip-mark")

    (row,) = ask(capsys, "list", "--access", access)[1]["keys"]
    assert (row["role"], row["models"], row["networks"], row["state"]) == (
        "operator",
        ["a", "b"],
        ["10.0.0.0/8"],
        "active",
    )
    assert (row["limits"]["tokens_per_month"], row["limits"]["concurrency"], row["limits"]["requests_per_minute"]) == (
        5,
        0,
        60,
    )


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--network", "10.0.0.1/8"], "networks.0"),
        (["--network", "here"], "networks.0"),
        (["--role", "root"], "role"),
        (["--model", "a\x1b[2J"], "models"),
        (["--tokens-per-month", str(2**60)], "limits.tokens_per_month"),
    ],
)
def test_a_mistake_names_the_option_and_makes_no_key(capsys, access, words, key):
    code, facts = ask(capsys, "create", "--owner", "alice", "--access", access, *words)

    assert code == 2
    assert key in facts["error"]["message"]
    assert not access.exists()


def test_limits_are_changed_while_a_server_runs_and_what_is_not_named_stays(capsys, access):
    facts = make(capsys, access, "--model", "a", "--network", "127.0.0.0/8", "--concurrency", "3")
    server = KeyStore.open(access)

    code, answer = ask(capsys, "limit", facts["key"], "--tokens-per-month", "5", "--days", "1", "--access", access)

    assert code == 0
    limits = server.limits_of(facts["key"])
    assert (limits.tokens_per_month, limits.concurrency, limits.requests_per_minute) == (5, 3, 60)
    assert answer["limits"] == limits.model_dump()
    assert answer["expires"] < facts["expires"]
    assert server.find_caller(facts["secret"], "127.0.0.1").models == {"a"}
    assert server.find_caller(facts["secret"], "10.0.0.1") is None


def test_each_option_of_a_limit_is_the_limit_of_its_name(capsys, access):
    options = ("requests-per-minute", "tokens-per-minute", "requests-per-month", "tokens-per-month", "concurrency")
    expected = {name.replace("-", "_"): number for number, name in enumerate(options)}
    words = [word for number, name in enumerate(options) for word in (f"--{name}", number)]
    made, changed = make(capsys, access, *words), make(capsys, access)

    assert ask(capsys, "limit", changed["key"], *words, "--access", access)[1]["limits"] == expected
    assert KeyStore.open(access).limits_of(made["key"]).model_dump() == expected


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "names nothing to change"),
        (["--tokens-per-month", str(2**60)], 2, "limits.tokens_per_month"),
        (["--concurrency", "1"], 5, "revoked for good"),
    ],
)
def test_a_limit_that_cannot_be_is_refused_and_changes_nothing(capsys, access, words, code, message):
    facts = make(capsys, access)
    if "revoked" in message:
        ask(capsys, "revoke", facts["key"], "--access", access)
    content = (access / "keys.json").read_bytes()

    assert ask(capsys, "limit", facts["key"], *words, "--access", access)[0] == code
    assert message in ask(capsys, "limit", facts["key"], *words, "--access", access)[1]["error"]["message"]
    assert (access / "keys.json").read_bytes() == content


def test_sealed_texts_are_shown_by_the_readers_key(capsys, access, tmp_path):
    facts, key = make(capsys, access), tmp_path / "reader.key"
    code, made = ask(capsys, "text-key", key)
    assert (code, made["public"]) == (0, f"{key}.pub")
    with Access.open(access, seal_texts=Path(made["public"])) as opened:
        caller = opened.key_store.find_caller(facts["secret"], "")
        texts = RequestTexts([{"text": "heron"}], ["flies\x1b[2J"])
        opened.request_log.record_request(caller, RequestFacts("/v1/completions", "ab", 200, texts=texts))

    code, answer = ask(capsys, "texts", key, "--access", access)

    assert code == 0
    assert [(row["key"], row["prompts"], row["answers"]) for row in answer["texts"]] == [
        (facts["key"], [{"text": "heron"}], ["flies\x1b[2J"])
    ]
    assert ask(capsys, "texts", key, "--access", access, "--key", "a" * 12)[1]["texts"] == []
    assert ask(capsys, "texts", access / "operator" / "signing.key", "--access", access)[0] == 5


def test_a_revoked_key_stays_on_the_list(capsys, access):
    facts = make(capsys, access)

    code, answer = ask(capsys, "revoke", facts["key"], "--access", access)
    assert (code, answer["owner"]) == (0, "alice")
    assert ask(capsys, "list", "--access", access)[1]["keys"][0]["state"] == "revoked"
    assert KeyStore.open(access).find_caller(facts["secret"], "") is None
    code, answer = ask(capsys, "revoke", "a" * 12, "--access", access)
    assert (code, answer["error"]["code"]) == (5, "PHX-V150")


def test_a_changed_file_is_refused_by_every_verb(capsys, access):
    facts = make(capsys, access)
    path = access / "keys.json"
    path.write_bytes(path.read_bytes().replace(b"alice", b"mallo"))

    for words in (["list"], ["usage"], ["revoke", facts["key"]], ["create", "--owner", "x"]):
        code, answer = ask(capsys, *words, "--access", access)
        assert (code, answer["error"]["code"]) == (5, "PHX-V150"), words


def test_a_directory_without_keys_is_named(capsys, access):
    code, answer = ask(capsys, "list", "--access", access)

    assert code == 5
    assert "operator.json" in answer["error"]["message"]


def test_the_operators_key_can_live_elsewhere(capsys, access, tmp_path):
    home = tmp_path / "stick"
    make(capsys, access, "--operator-home", home)

    assert not (access / "operator").exists()
    code, answer = ask(capsys, "create", "--owner", "bob", "--access", access)
    assert (code, "signing.key" in answer["error"]["message"]) == (5, True)
    make(capsys, access, "--operator-home", home, owner="bob")


def test_usage_is_shown_by_key_and_day_and_the_log_is_checked_while_a_server_runs(capsys, access):
    facts = make(capsys, access)
    make(capsys, access, owner="bob")
    with Access.open(access) as server:
        caller = server.key_store.find_caller(facts["secret"], "")
        reservation = server.budgets.begin(caller)
        reservation.reserve_tokens(10, 20)
        reservation.settle(3, 4)
        server.request_log.record_request(caller, RequestFacts("/v1/completions", "", 200))

        code, answer = ask(capsys, "usage", "--access", access)
        (row,) = answer["usage"]
        assert (code, row["owner"], row["requests"], row["prompt_tokens"], row["completion_tokens"]) == (
            0,
            "alice",
            1,
            3,
            4,
        )
        assert ask(capsys, "usage", "--access", access, "--key", "a" * 12)[1]["usage"] == []
        assert ask(capsys, "log", "--access", access)[1]["kinds"] == {"request": 1}

    path = access / "log" / "requests-000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"status":200', b'"status":201'))
    code, answer = ask(capsys, "log", "--access", access)
    assert (code, "line 1" in answer["error"]["message"]) == (5, True)
