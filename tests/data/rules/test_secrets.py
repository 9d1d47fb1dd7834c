"""Keys and tokens that were published by mistake are masked, or their document goes or waits."""

import base64
import itertools
import json

import pytest

from phalanx.data.rules import Drop, Edit, Page, Quarantine, RuleReason, SecretsConfig, make_rule
from phalanx.data.rules.secrets import SHAPES, find_secrets
from phalanx.data.sources import Document

RANDOM = "aB3dE5gH7jK9mN1pQ2sT4vW6yZ8xC0rF2uL5oI7"
HEAD = base64.urlsafe_b64encode(json.dumps({"alg": "HS256"}).encode()).decode().rstrip("=")
BODY = base64.urlsafe_b64encode(json.dumps({"sub": "1234567890"}).encode()).decode().rstrip("=")
BLOCK = f"-----BEGIN RSA PRIVATE KEY-----\n{RANDOM}{RANDOM}\n{RANDOM}==\n-----END RSA PRIVATE KEY-----"

SECRETS = [
    ("private_key", BLOCK),
    ("aws_key", "AKIA" + "ABCDEFGH2345WXYZ"),
    ("github_token", "ghp_" + RANDOM[:36]),
    ("gitlab_token", "glpat-" + RANDOM[:20]),
    ("slack_token", "xoxb-123456789012-" + RANDOM[:20]),
    ("slack_webhook", "hooks.slack.com/services/T0ABCDEF1/B0ABCDEF1/" + RANDOM[:24]),
    ("jwt", f"{HEAD}.{BODY}.{RANDOM}"),
    ("google_key", "AIza" + RANDOM[:35]),
    ("stripe_key", "sk_live_" + RANDOM[:24]),
    ("npm_token", "npm_" + RANDOM[:36]),
    ("pypi_token", "pypi-AgE" + RANDOM + RANDOM),
    ("hugging_face_token", "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZaBcDeFgH"),
    ("model_service_key", "sk-proj-" + RANDOM),
]


def judge(text, action="mask"):
    return make_rule(SecretsConfig(action=action)).judge_page(Page(Document("a", text), "code"))


@pytest.mark.parametrize(("kind", "secret"), SECRETS, ids=[kind for kind, _ in SECRETS])
def test_a_secret_is_masked_with_its_kind(kind, secret):
    found = judge(f"export KEY='{secret}'; run")

    assert found == Edit(f"export KEY='<{kind}>'; run", 1, RuleReason("secrets", f"{kind} 1; first at character 12", 0))


@pytest.mark.parametrize(("kind", "secret"), SECRETS, ids=[kind for kind, _ in SECRETS])
def test_a_secret_is_masked_between_letters_of_a_script_without_spaces(kind, secret):
    assert judge(f"密钥{secret}是").text == f"密钥<{kind}>是"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f'api_key = "{RANDOM}"', 'api_key = "<named_token>"'),
        (f'"client_secret": "{RANDOM}"', '"client_secret": "<named_token>"'),
        ("postgres://app:hunter-2x@db/x", "postgres://app:<url_password>@db/x"),
    ],
)
def test_of_a_named_value_the_value_alone_is_masked(text, shown):
    assert judge(text).text == shown


def test_every_kind_of_the_table_is_tested():
    assert {kind for kind, _ in SECRETS} | {"named_token", "url_password"} == {shape.kind for shape in SHAPES}


@pytest.mark.parametrize(
    "text",
    [
        "AKIA is how such keys begin",
        "XAKIAABCDEFGH2345WXYZ",
        "ghp_short",
        "eyJhbGciOi.eyJhbGciOi.abcdefghijkl",  # no JSON in it
        'password = "change-me-change-me"',
        'token = "xxxxxxxxxxxxxxxxxxxxxxxx"',
        "https://user:password@example.org",
        "https://example.org:8080/@name",
        "-----BEGIN CERTIFICATE-----",
        RANDOM,
    ],
)
def test_what_only_looks_like_a_secret_stays(text):
    assert judge(text) is None


def test_a_key_whose_end_is_cut_off_is_masked_as_far_as_it_goes():
    found = judge(BLOCK.partition("-----END")[0] + "And then the page goes on.")

    assert found.text == "<private_key>And then the page goes on."


def test_of_two_keys_without_an_end_each_is_masked():
    key = BLOCK.partition("-----END")[0]

    assert [span.kind for span in find_secrets(key + "one, two\n" + key)] == ["private_key"] * 2


def test_the_reason_shows_place_and_kind_and_no_character_of_the_secret():
    secret = "ghp_" + RANDOM[:36]

    dropped, waiting = judge(f"a {secret}", "drop"), judge(f"a {secret}", "quarantine")

    assert dropped == Drop(RuleReason("secrets", "github_token 1; first at character 2", 0))
    assert waiting == Quarantine(dropped.reason)
    assert RANDOM[:8] not in repr(dropped)


HOSTILE = [
    *(anchor for shape in SHAPES for anchor in shape.anchors),
    *("eyJaaaaaaaaaa.", "eyJaaaaaaaaaa ", "://a:b", "-----BEGIN PRIVATE KEY-----", "api_key='", "xoxb-a", "sk-a-"),
]


def test_hostile_characters_of_every_kind_are_read_to_their_end():
    spans = find_secrets("\n".join(piece * (40_000 // len(piece)) for piece in HOSTILE))

    assert all(one.end <= other.start for one, other in itertools.pairwise(spans))


@pytest.mark.slow
@pytest.mark.parametrize("piece", HOSTILE)
def test_a_million_hostile_characters_are_read_to_their_end(piece):
    text = piece * (1_000_000 // len(piece))

    spans = find_secrets(text)

    assert all(one.end <= other.start for one, other in itertools.pairwise(spans))
