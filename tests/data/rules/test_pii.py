"""Personal data is masked, tagged or dropped by kind; what only looks like it stays."""

import itertools
import unicodedata

import pytest
from pydantic import ValidationError

from phalanx.data.rules import Drop, Edit, Page, PiiConfig, RuleReason, Tag, make_rule
from phalanx.data.rules.pii import find_personal_data
from phalanx.data.sources import Document


def judge(text, fields=None, **settings):
    return make_rule(PiiConfig(**settings)).judge_page(Page(Document("a", text, fields=fields or {}), "books"))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("email", "o'brien+list@mail.example.co.uk"),
        ("email", "a@b-c.de"),
        ("phone", "+49 (0)30 1234-5678"),
        ("phone", "(214) 365-8790"),
        ("phone", "1-800-555-1212"),
        ("ip", "8.8.8.8"),
        ("ip", "2001:4860:4860::8888"),
        ("card", "4111 1111 1111 1111"),
        ("card", "378282246310005"),
        ("card", "5555-5555-5555-4444"),
        ("iban", "GB82 WEST 1234 5698 7654 32"),
        ("iban", "DE89370400440532013000"),
        ("national_number", "078-05-1120"),
        ("national_number", "943 476 5919"),
        ("national_number", "12345678Z"),
        ("national_number", "X1234567L"),
        ("national_number", "2 55 08 14 168 025 38"),
        ("national_number", "131052-308T"),
        ("national_number", "811228-9874"),
        ("national_number", "RSSMRA85T10A562S"),
    ],
)
@pytest.mark.parametrize("around", ["{}", "write to {}.", "({}), and so on", "<{}>", "a\n{}\nb"])
def test_personal_data_is_masked_wherever_it_stands(kind, text, around):
    found = judge(around.format(text))

    assert found == Edit(around.format(f"<{kind}>"), 1, RuleReason("pii", f"{kind} 1"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("an jörg.müller@example.de", "an <email>"),
        ("info@münchen.de, u@www.muenchün.de", "<email>, <email>"),
        (unicodedata.normalize("NFD", "an müller@münchen.de"), "an <email>"),
        ("иван@почта.рф; a@उदाहरण.भारत", "<email>; <email>"),
        ("请联系foo@bar.com谢谢，a@例子.中国，好", "请联系<email>谢谢，<email>，好"),
        ("foo＠example．com으로", "<email>으로"),
        ("地址8.8.8.8是，2001:4860:4860::8888是", "地址<ip>是，<ip>是"),
        ("卡号4111 1111 1111 1111是", "卡号<card>是"),
        ("账号DE89370400440532013000是", "账号<iban>是"),
        ("电话+81 90-1234-5678です、번호는+82 2 1234 5678입니다", "电话<phone>です、번호는<phone>입니다"),
        ("TEL：＋８１－９０－１２３４－５６７８", "TEL：<phone>"),
        ("４１１１　１１１１　１１１１　１１１１", "<card>"),
        ("٤١١١ ١١١١ ١١١١ ١١١١", "<card>"),
        ("+33\u202f6\u202f12\u202f34\u202f56\u202f78 et 4111\u00a01111\u00a01111\u00a01111", "<phone> et <card>"),
        ("GB82\u00a0WEST\u00a01234\u00a05698\u00a07654\u00a032", "<iban>"),
        ("+49 30 1234–5678, 078‑05‑1120", "<phone>, <national_number>"),
        ("8.8.8.8–8.8.4.4, 1–800–555–1212", "<ip>–<ip>, <phone>"),
    ],
)
def test_personal_data_is_found_beside_and_in_other_scripts(text, shown):
    assert judge(text).text == shown


@pytest.mark.parametrize(
    "text", ["é8.8.8.8", "ж4111 1111 1111 1111", "微博@例子。新闻", "a@例子", "１２：３０：４５ａｂ：ｃｄ"]
)
def test_letters_around_a_number_and_texts_of_other_scripts_stay(text):
    assert judge(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "4111 1111 1111 1112",  # a card but for its check digit
        "GB82 WEST 1234 5698 7654 33",
        "666-05-1120",
        "943 476 5910",
        "12345678A",
        "131052-308U",
        "RSSMRA85T10A562T",
        "10.0.0.1 and 127.0.0.1 and 224.0.0.1",
        "version 1.2.3.4",
        "999.1.1.1",
        "1.2.3.4.5",
        "std::vector and cafe::face and 12:30:45",
        "fe80::1",
        "user@localhost",
        "@decorator and a @ b.c",
        "2002-09-21 12:30 to 2002-10-21",
        "3.1415926535897932384626",
        "1234567890123456789012345678",
        "0000 0000 0000 0000",
        "pages 100-200-3000",
        "123456782",  # a Dutch number without its name
    ],
)
def test_what_only_looks_like_personal_data_stays(text):
    assert judge(text) is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("BSN: 123456782", "BSN: <national_number>"),
        ("PESEL 44051401359", "PESEL <national_number>"),
        ("Steuer-ID 86 095 742 719", "Steuer-ID <national_number>"),
        ("NHS number 9434765919", "NHS number <national_number>"),
        ("Phone: 214 365 8790", "Phone: <phone>"),
        ("tel. 030 / 1234 567", "tel. <phone>"),
    ],
)
def test_a_number_that_many_others_look_like_needs_its_name_before_it(text, shown):
    found = judge(text)

    assert isinstance(found, Edit)
    assert found.text == shown


def test_several_kinds_are_masked_in_one_pass_and_counted():
    found = judge("a@b.org, c@d.org from 8.8.4.4, call +1 214 365 8790")

    assert found == Edit("<email>, <email> from <ip>, call <phone>", 4, RuleReason("pii", "email 2, ip 1, phone 1"))


def test_a_mask_is_stable_a_second_pass_changes_nothing():
    first = judge("a@b.org, c@d.org from 8.8.4.4, call +1 214 365 8790")

    assert judge(first.text) is None


def test_a_kind_that_drops_comes_before_masks():
    found = judge("a@b.org pays with 4111 1111 1111 1111", card="drop")

    assert found == Drop(RuleReason("pii card", 1, 0))


def test_tags_count_by_kind_and_leave_the_text():
    kinds = dict.fromkeys(("email", "phone", "ip", "card", "iban", "national_number"), "tag")

    assert judge("a@b.org and c@d.org, 8.8.8.8", **kinds) == Tag({"pii_email": 2, "pii_ip": 1})


def test_names_that_a_model_found_beforehand_are_masked_the_longest_first():
    fields = {"people": "Ada Lovelace; Ada"}

    found = judge("Ada Lovelace wrote it. Ada did, Adam did not.", fields, name="mask", names_field="people")

    assert found.text == "<name> wrote it. <name> did, Adam did not."


@pytest.mark.parametrize("action", ["mask", "tag", "drop"])
def test_a_document_whose_names_nobody_looked_for_is_dropped(action):
    others = dict.fromkeys(("email", "phone", "ip", "card", "iban", "national_number"), "leave")
    text, names = "Ada wrote it.", {**others, "name": action, "names_field": "people"}

    dropped = Drop(RuleReason("pii name", "no field", "people"))
    assert [judge(text, fields, **names) for fields in ({}, {"people": 3}, {"person": "Ada"})] == [dropped] * 3
    assert judge(text, {"people": ""}, **names) is None
    assert judge(text, {"people": "Ada"}, **names) not in (None, dropped)


@pytest.mark.parametrize(
    ("names", "text", "shown"),
    [
        ("Müller", unicodedata.normalize("NFD", "Herr Müller kam"), "Herr <name> kam"),
        (unicodedata.normalize("NFD", "Müller"), "Herr Müller kam", "Herr <name> kam"),
        ("张三; Ada", "我叫张三，他是Ada的朋友", "我叫<name>，他是<name>的朋友"),
        ("김철수", "김철수는 왔다", "<name>는 왔다"),
        ("Ada Lovelace", "Ada\u00a0Lovelace, Ada\nLovelace", "<name>, <name>"),
    ],
)
def test_names_are_found_in_either_normal_form_and_script(names, text, shown):
    assert judge(text, {"people": names}, name="mask", names_field="people").text == shown


def test_a_name_is_not_found_in_a_longer_word_that_ends_in_a_combining_mark():
    text = unicodedata.normalize("NFD", "André")

    assert judge(text, {"people": "Andre"}, name="mask", names_field="people") is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "mask"}, "includes no model of names"),
        ({"names_field": "people"}, "includes no model of names"),
        ({"email": "tag"}, "masks or tags"),
        (dict.fromkeys(("email", "phone", "ip", "card", "iban", "national_number"), "leave"), "remove the step"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        PiiConfig(**settings)


HOSTILE = [
    "@",
    "a@",
    "a.",
    "1",
    "1-",
    "+1 ",
    "(1",
    "1.",
    ":",
    "a:",
    "::",
    "GB82 ",
    "4111 ",
    "A",
    "AA11",
    "a@a.",
    "0 (",
    "é@é.",
    "例@例.",
    "a@例",
    "＠１",
]


def test_hostile_characters_of_every_kind_are_read_to_their_end():
    spans = find_personal_data("\n".join(piece * (40_000 // len(piece)) for piece in HOSTILE))

    assert all(one.end <= other.start for one, other in itertools.pairwise(spans))


@pytest.mark.slow
@pytest.mark.parametrize("piece", HOSTILE)
def test_a_million_hostile_characters_are_read_to_their_end(piece):
    text = piece * (1_000_000 // len(piece))

    spans = find_personal_data(text)

    assert all(one.end <= other.start for one, other in itertools.pairwise(spans))
