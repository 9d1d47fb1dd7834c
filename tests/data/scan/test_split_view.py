"""What was fetched is compared with what was recorded, in every way in which archives write a digest."""

import base64
import hashlib

import pytest

from phalanx.data.rules import Page, Quarantine, RuleReason
from phalanx.data.scan import make_scan
from phalanx.data.scan.split_view import SplitViewConfig, read_digest
from phalanx.data.sources import Document
from phalanx.data.sources.source import Origin
from phalanx.errors import DataError

CONTENT, OTHER = b"a page", b"another page"
URL = "https://example.org/a"


def page(recorded, content=CONTENT, **fields):
    origin = Origin(len(content), hashlib.sha256(content).hexdigest(), url=URL, recorded_digest=recorded)
    return Page(Document("a", content.decode(), origin, fields), "web")


def judge(*args, settings=None, **fields):
    return make_scan(SplitViewConfig(**(settings or {}))).judge(page(*args, **fields))


def base32(name, content):
    return f"{name}:{base64.b32encode(hashlib.new(name, content).digest()).decode()}"


@pytest.mark.parametrize("form", ["sha256:{}", "SHA-256:{}"])
def test_a_changed_content_is_set_aside_and_both_digests_are_told(form):
    recorded = form.format(hashlib.sha256(OTHER).hexdigest())

    found = judge(recorded)

    told = f"recorded {hashlib.sha256(OTHER).hexdigest()}, fetched {hashlib.sha256(CONTENT).hexdigest()}, sha256"
    assert found == Quarantine(RuleReason("split view", told))
    assert judge(recorded, OTHER) is None


def test_a_digest_in_base32_as_an_archive_writes_it_is_compared():
    assert judge(base32("sha256", CONTENT)) is None
    assert isinstance(judge(base32("sha256", OTHER)), Quarantine)


def test_a_sha1_is_compared_with_the_payload_that_the_source_tells():
    payload = hashlib.sha1(CONTENT).hexdigest()

    assert judge(base32("sha1", CONTENT), payload_sha1=payload) is None
    assert isinstance(judge(base32("sha1", OTHER), payload_sha1=payload), Quarantine)


@pytest.mark.parametrize("recorded", [None, base32("sha1", OTHER)])
def test_what_cannot_be_compared_passes_unless_the_recipe_says_otherwise(recorded):
    assert judge(recorded) is None
    assert isinstance(judge(recorded, settings={"without_digest": "quarantine"}), Quarantine)


@pytest.mark.parametrize(
    "claim", ["md5:00", "sha1:xyz", "sha256:" + "0" * 63, "sha256", "", ":", "sha1:" + "\u0660" * 40]
)
def test_a_claim_that_cannot_be_understood_proves_nothing(claim):
    assert read_digest(claim) is None
    if claim:
        assert isinstance(judge(claim), Quarantine)


def test_a_document_without_an_origin_passes():
    assert make_scan(SplitViewConfig()).judge(Page(Document("a", "text"), "books")) is None


def test_a_list_of_a_third_party_speaks_against_an_archive_that_agrees_with_itself(tmp_path):
    own = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
    (tmp_path / "list.txt").write_text(f"sha256:{hashlib.sha256(OTHER).hexdigest()} {URL}\n")

    assert judge(own) is None
    assert isinstance(judge(own, settings={"recorded": (tmp_path / "list.txt",)}), Quarantine)


def test_a_line_of_that_list_that_is_no_digest_is_an_error(tmp_path):
    (tmp_path / "list.txt").write_text(f"{URL} sha256:00\n")

    with pytest.raises(DataError, match="expected `sha256:digest address`"):
        judge(None, settings={"recorded": (tmp_path / "list.txt",)})
