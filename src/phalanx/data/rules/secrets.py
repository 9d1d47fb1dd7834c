"""Keys and tokens that were published by mistake, found by the marks that their issuers put at their beginning.

Nothing here goes by entropy: measured on mail, entropy alone has 58,000 hits in a hundred messages. A secret without a
known beginning and without a name before it (``password = "..."``) is therefore not found.
"""

import base64
import binascii
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from phalanx.data.rules.page import Page
from phalanx.data.rules.pii import Span, mask_spans
from phalanx.data.rules.rule import Drop, Edit, Outcome, Quarantine, RuleReason, RuleSettings

_KEY_BLOCK_CHARACTERS = 32_768
_END_OF_BLOCK = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_CUT_BLOCK = re.compile(
    r"\s{0,4}(?:[A-Za-z-]{4,16}: [^\n]{1,99}\n\s{0,4}){0,4}"
    r"(?:[A-Za-z0-9+/=]{16,80}\s{1,4})*(?:[A-Za-z0-9+/]{0,80}={1,2})?"
)


class SecretsConfig(RuleSettings):
    """Private keys, and tokens of cloud, code and chat services; masked, or the whole document goes or waits."""

    kind: Literal["secrets"] = "secrets"
    action: Literal["mask", "drop", "quarantine"] = "mask"


@dataclass(frozen=True)
class SecretShape:
    """How one kind of secret looks.

    Attributes:
        anchors: Each secret begins with one of them; they are searched for in C.
        pattern: Read from there. It looks at the character before first, and its runs are bounded and share no
            characters, so each character is read a fixed number of times.
        group: The part of the pattern that is the secret itself.
    """

    kind: str
    anchors: tuple[str, ...]
    pattern: re.Pattern[str]
    check: Callable[[str], bool] = bool
    group: int = 0


def _is_jwt(text: str) -> bool:
    head = text.split(".", 1)[0]
    try:
        fields = json.loads(base64.urlsafe_b64decode(head + "=" * (-len(head) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and "alg" in fields


def _is_random(text: str) -> bool:
    """Tell a value from a placeholder: letters and digits in it, and several different ones."""
    return len(set(text)) >= 10 and any(map(str.isdigit, text)) and any(map(str.isalpha, text))


def _is_password(text: str) -> bool:
    return len(set(text)) > 2 and not text.lower().startswith(("pass", "pwd", "secret", "xxx", "$", "<", "{", "["))


_NAMES = ("api", "API", "Api", "secret", "SECRET", "Secret", "token", "TOKEN", "Token", "passw", "PASSW", "Passw")

SHAPES: tuple[SecretShape, ...] = (
    SecretShape(
        "private_key",
        ("-----BEGIN ",),
        re.compile(r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,2}PRIVATE KEY(?: BLOCK)?-----"),
    ),
    SecretShape("aws_key", ("AKIA", "ASIA"), re.compile(r"(?<!\w)A(?:KI|SI)A[A-Z2-7]{16}(?!\w)", re.ASCII)),
    SecretShape(
        "github_token",
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
        re.compile(r"(?<!\w)(?:gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{22,255})(?!\w)", re.ASCII),
    ),
    SecretShape("gitlab_token", ("glpat-",), re.compile(r"(?<![\w-])glpat-[\w-]{20,64}(?![\w-])", re.ASCII)),
    SecretShape("slack_token", ("xox",), re.compile(r"(?<![\w-])xox[abeoprs]-[0-9A-Za-z-]{10,250}(?![\w-])", re.ASCII)),
    SecretShape(
        "slack_webhook",
        ("hooks.slack.com/",),
        re.compile(r"hooks\.slack\.com/services/T[A-Z0-9]{6,14}/B[A-Z0-9]{6,14}/[A-Za-z0-9]{16,32}(?!\w)", re.ASCII),
    ),
    SecretShape(
        "jwt",
        ("eyJ",),
        re.compile(r"(?<![\w.-])eyJ[\w-]{10,4096}\.eyJ[\w-]{4,8192}\.[\w-]{10,2048}(?![\w-])", re.ASCII),
        _is_jwt,
    ),
    SecretShape("google_key", ("AIza",), re.compile(r"(?<![\w-])AIza[\w-]{35}(?![\w-])", re.ASCII)),
    SecretShape(
        "stripe_key",
        ("sk_live_", "rk_live_"),
        re.compile(r"(?<!\w)[rs]k_live_[0-9A-Za-z]{20,99}(?!\w)", re.ASCII),
        _is_random,
    ),
    SecretShape("npm_token", ("npm_",), re.compile(r"(?<!\w)npm_[A-Za-z0-9]{36}(?!\w)", re.ASCII), _is_random),
    SecretShape("pypi_token", ("pypi-AgE",), re.compile(r"(?<![\w-])pypi-AgE[\w-]{50,255}(?![\w-])", re.ASCII)),
    SecretShape("hugging_face_token", ("hf_",), re.compile(r"(?<!\w)hf_[A-Za-z]{34}(?!\w)", re.ASCII)),
    SecretShape(
        "model_service_key",
        ("sk-",),
        re.compile(r"(?<![\w-])sk-(?:proj-|ant-|svcacct-)?[\w-]{32,200}(?![\w-])", re.ASCII),
        _is_random,
    ),
    SecretShape(
        "url_password",
        ("://",),
        re.compile(r"://[\w.~%+-]{1,64}:([^\s/:@<>\"']{4,64})@(?=[\w\[])"),
        _is_password,
        group=1,
    ),
    SecretShape(
        "named_token",
        _NAMES,
        re.compile(
            r"(?:api[_-]?key|(?:api|access|auth|secret|client)?[_-]?(?:secret|token)(?:[_-]?key)?|passw(?:or)?d)"
            r"[\"']?[ \t]{0,4}(?:=>|:=|[=:])[ \t]{0,4}[\"']([\w/+=.~-]{16,128})[\"']",
            re.IGNORECASE | re.ASCII,
        ),
        _is_random,
        group=1,
    ),
)
"""Kinds of secrets; to add one: one entry."""


class Secrets:
    """Masks each secret with its kind, or drops or sets aside the document."""

    def __init__(self, config: SecretsConfig) -> None:
        self._action = config.action

    def judge_page(self, page: Page) -> Outcome:
        """Tell kinds, counts and the first place; never a character of the secret."""
        spans = find_secrets(page.text)
        if not spans:
            return None
        counts = Counter(span.kind for span in spans)
        summary = ", ".join(f"{kind} {counts[kind]}" for kind in sorted(counts))
        reason = RuleReason("secrets", f"{summary}; first at character {spans[0].start}", 0)
        if self._action == "mask":
            return Edit(mask_spans(page.text, spans), len(spans), reason)
        return Drop(reason) if self._action == "drop" else Quarantine(reason)


def find_secrets(text: str) -> list[Span]:
    """Return every secret with a known beginning, in order; of two that overlap the first."""
    spans = sorted(
        (span for shape in SHAPES for span in _find_shape(text, shape)), key=lambda span: (span.start, -span.end)
    )
    spans_kept: list[Span] = []
    for span in spans:
        if not spans_kept or span.start >= spans_kept[-1].end:
            spans_kept.append(span)
    return spans_kept


def _find_shape(text: str, shape: SecretShape) -> Iterator[Span]:
    for anchor in shape.anchors:
        position = text.find(anchor)
        while position >= 0:
            match, after = shape.pattern.match(text, position), position + 1
            if match and shape.check(match[shape.group]):
                start, after = match.span(shape.group)
                if shape.kind == "private_key":
                    after = _block_end(text, after)
                yield Span(start, after, shape.kind)
            position = text.find(anchor, after)


def _block_end(text: str, start: int) -> int:
    """Return the end of a key's block; without an end, all that looks like a part of the key."""
    limit = min(start + _KEY_BLOCK_CHARACTERS, len(text))
    closing = text.find("-----END ", start, limit)
    if closing >= 0:
        block_end = _END_OF_BLOCK.match(text, closing)
        return block_end.end() if block_end else closing
    body = _CUT_BLOCK.match(text, start, limit)
    return body.end() if body else start
