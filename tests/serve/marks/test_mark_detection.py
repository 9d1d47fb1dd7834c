"""Marked text is found by its keys alone, nobody else's text is, and short or poor text gets no verdict."""

import math

import pytest
import torch

from phalanx.models.token_draw import uniform_numbers
from phalanx.serve import SamplingRule
from phalanx.serve.marks import MarkKey, MarkPolicy, TokenMark, detect_mark, draw_next
from phalanx.serve.marks.detect import log_gamma_tail
from phalanx.serve.marks.race import CONTEXT_TOKENS, LANES, mark_row_key

VOCAB = 200
RULE = SamplingRule(temperature=1.0, top_p=1.0)
KEY, OTHER = MarkKey(1, b"a" * 32), MarkKey(2, b"b" * 32)


def write(length, *, key=KEY, seed=0, rule=RULE, mark="on", spread=2.0):
    """Write a text by logits that the last token and the place decide."""
    table = spread * torch.randn((VOCAB, VOCAB), generator=torch.Generator().manual_seed(3))
    draw, tokens = TokenMark(MarkPolicy(mark=mark), key).begin_text(rule, seed), [0]
    for _ in range(length):
        drawn, _ = draw_next([draw], table[(tokens[-1] + len(tokens)) % VOCAB][None])
        tokens.append(int(drawn[0]))
    return tokens[1:]


@pytest.mark.parametrize("seed", range(LANES))
@pytest.mark.parametrize("rule", [RULE, SamplingRule(temperature=0.0), SamplingRule(temperature=0.7, top_k=20)])
def test_marked_text_is_found_in_every_lane_and_its_epoch_is_named(rule, seed):
    verdict = detect_mark(write(300, seed=seed, rule=rule), [OTHER, KEY])

    assert (verdict.verdict, verdict.epoch, verdict.num_tests) == ("marked", 1, 2 * LANES)
    assert verdict.p_value <= 1e-6


def test_a_text_is_found_within_another_one_and_after_a_cut():
    marked, plain = write(300), write(100, mark="off", seed=9)

    assert detect_mark(plain[:50] + marked + plain[50:], [KEY]).verdict == "marked"
    assert detect_mark(marked[120:], [KEY]).verdict == "marked"


@pytest.mark.parametrize("tokens", [write(300, mark="off"), write(300, key=OTHER)], ids=["plain", "of another key"])
def test_text_without_these_keys_is_not_marked(tokens):
    verdict = detect_mark(tokens, [KEY])

    assert (verdict.verdict, verdict.p_value > 0.01) == ("not marked", True)


def test_an_attacker_without_the_secret_cannot_forge_a_mark():
    guess = MarkKey(1, b"c" * 32)
    forged = write(400, key=guess, spread=0.0)

    # the attacker knows all but the secret, and wins where it is known
    assert detect_mark(forged, [guess]).verdict == "marked"
    assert detect_mark(forged, [KEY]).verdict == "not marked"


@pytest.mark.parametrize(
    "tokens",
    [[], [1] * 5, list(range(CONTEXT_TOKENS + 15)), [1, 2, 3] * 400],
    ids=["empty", "few", "one too few", "long and repetitive"],
)
def test_short_and_repetitive_text_gets_no_verdict(tokens):
    verdict = detect_mark(tokens, [KEY])

    assert (verdict.verdict, verdict.p_value) == ("cannot tell", 1.0)


def test_a_weak_sign_gets_no_verdict():
    tokens = write(400, spread=5.0)
    verdicts = [detect_mark(tokens[:end], [KEY]).verdict for end in range(20, 400, 4)]

    assert verdicts[0] == "cannot tell"
    assert verdicts[-1] == "marked"
    assert "not marked" not in verdicts


def test_the_p_value_is_the_gamma_tail():
    # closed forms of one and two exponentials
    assert math.isclose(log_gamma_tail(1, 5.0), -5.0)
    assert math.isclose(log_gamma_tail(2, 5.0), math.log(6.0) - 5.0)
    assert log_gamma_tail(7, 0.0) == 0.0
    for shape, score in ((10, 12.0), (300, 310.0), (300, 200.0)):
        exact = torch.special.gammaincc(*(torch.tensor(float(n), dtype=torch.float64) for n in (shape, score)))
        assert math.isclose(log_gamma_tail(shape, score), math.log(exact), abs_tol=1e-9)
    assert log_gamma_tail(1000, 5000.0) < -1000


def false_alarms(texts, keys, judge):
    return sum(judge(text, [key]) <= 0.01 for text in texts for key in keys) / (len(texts) * len(keys))


def without_deduplication(tokens, keys):
    """Judge as a detector that counts every place, and one lane."""
    (key,) = keys
    contexts = [tuple(tokens[n - CONTEXT_TOKENS : n]) for n in range(CONTEXT_TOKENS, len(tokens))]
    rows = torch.tensor([mark_row_key(key, 0, context) for context in contexts])
    chosen = torch.tensor(tokens[CONTEXT_TOKENS:])[:, None]
    return math.exp(log_gamma_tail(len(contexts), -float(torch.log1p(-uniform_numbers(rows, chosen)).sum())))


def test_repetitive_text_of_others_is_not_accused():
    """The attack: a text that repeats a template, so that one lucky place counts many times."""
    generator = torch.Generator().manual_seed(5)
    texts = []
    for _ in range(25):
        template = torch.randint(0, VOCAB, (25,), generator=generator).tolist()
        fields = torch.randint(0, VOCAB, (20,), generator=generator).tolist()
        texts.append([token for value in fields for token in (*template, value)])
    keys = [MarkKey(1, bytes([n]) * 32) for n in range(25)]

    accused = false_alarms(texts, keys, lambda text, ring: detect_mark(text, ring).p_value)
    accused_without = false_alarms(texts, keys, without_deduplication)

    # 625 judgements at .01: five standard deviations are .02
    assert accused <= 0.01 + 0.02
    assert accused_without > 0.1


def test_more_keys_make_the_verdict_no_bolder():
    tokens = write(60)
    alone, many = (
        detect_mark(tokens, [KEY]),
        detect_mark(tokens, [MarkKey(n, bytes([n]) * 32) for n in range(1, 25)] + [KEY]),
    )

    assert math.isclose(many.log10_p_value, alone.log10_p_value + math.log10(25), abs_tol=1e-6)


def test_a_text_sewn_of_marked_passages_is_marked():
    """A limit that the page names: an attacker without the key reuses runs of tokens that the server wrote."""
    passages = [write(40, seed=seed) for seed in range(0, 12 * LANES, LANES)]

    sewn = [token for passage in passages for token in passage[8:20]]

    assert detect_mark(sewn, [KEY]).verdict == "marked"
