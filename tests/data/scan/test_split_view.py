"""What was fetched is compared with what was recorded, in every way in which archives write a digest."""

import base64
import hashlib

import pytest
from made_scans import make_scan

from phalanx.data.rules import Page, Quarantine, RuleReason
from phalanx.data.scan.split_view import SplitViewConfig, read_digest
from phalanx.data.sources import Document
from phalanx.data.sources.source import Origin
from phalanx.errors import DataError

CONTENT, OTHER = b"a page", b"another page"
URL = "https://example.org/a"


def page(recorded, holds=None, content=CONTENT):
    digest = hashlib.sha256(content).hexdigest()
    return Page(Document("a", "text", Origin(len(content), digest, URL, None, recorded, holds)), "web")


def judge(*args, settings=None, **fields):
    return make_scan(SplitViewConfig(**(settings or {}))).judge_page(page(*args, **fields))


def base32(name, content):
    return f"{name}:{base64.b32encode(hashlib.new(name, content).digest()).decode()}"


def test_a_payload_that_is_not_the_recorded_one_is_set_aside_and_the_digest_told():
    recorded = base32("sha1", OTHER)

    assert judge(recorded, False) == Quarantine(
        RuleReason("split view", f"recorded {recorded}, fetched something else")
    )
    assert judge(recorded, True) is None


@pytest.mark.parametrize("recorded", [None, base32("sha1", OTHER)])
def test_what_cannot_be_compared_passes_unless_the_recipe_says_otherwise(recorded):
    assert judge(recorded) is None
    assert isinstance(judge(recorded, settings={"without_digest": "quarantine"}), Quarantine)


def test_digests_are_read_in_hex_and_in_base32_as_an_archive_writes_them():
    for name in ("sha1", "sha256"):
        digest = hashlib.new(name, CONTENT)

        assert read_digest(base32(name, CONTENT)) == (name, digest.digest())
        assert read_digest(f"{name.upper()}:{digest.hexdigest()}") == (name, digest.digest())


@pytest.mark.parametrize(
    "claim", ["md5:00", "sha1:xyz", "sha256:" + "0" * 63, "sha256", "", ":", "sha1:" + "\u0660" * 40]
)
def test_a_claim_that_cannot_be_understood_proves_nothing(claim):
    assert read_digest(claim) is None
    if claim:
        assert isinstance(judge(claim), Quarantine)


def test_a_document_without_an_origin_passes():
    assert make_scan(SplitViewConfig()).judge_page(Page(Document("a", "text"), "books")) is None


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (f"sha256:{hashlib.sha256(OTHER).hexdigest()}", True),
        (f"sha256:{hashlib.sha256(CONTENT).hexdigest()}", False),
        (base32("sha1", OTHER), True),
        (base32("sha1", CONTENT), False),
    ],
)
def test_a_list_of_a_third_party_speaks_against_an_archive_that_agrees_with_itself(tmp_path, line, found):
    (tmp_path / "list.txt").write_text(f"{line} {URL}\n")

    assert judge(base32("sha1", CONTENT), True) is None
    outcome = judge(base32("sha1", CONTENT), True, settings={"recorded": (tmp_path / "list.txt",)})
    assert isinstance(outcome, Quarantine) is found


def test_a_line_of_that_list_that_is_no_digest_is_an_error(tmp_path):
    (tmp_path / "list.txt").write_text(f"{URL} sha256:00\n")

    with pytest.raises(DataError, match="expected `sha256:digest address`"):
        judge(None, settings={"recorded": (tmp_path / "list.txt",)})
