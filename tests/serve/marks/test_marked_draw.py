"""A marked text is an exact draw of the model, is never silently unmarked, and repeats itself no more than others."""

import itertools
import math
import secrets
from collections import Counter

import pytest
import torch
from pydantic import ValidationError

from phalanx.errors import ConfigError, ModelError
from phalanx.models.token_draw import check_draws, draw_tokens
from phalanx.serve import SamplingRule
from phalanx.serve.marks import MarkKey, MarkPolicy, MarkRefused, TextDraw, TokenMark, draw_next
from phalanx.serve.marks.race import LANES, mark_row_key

RULE = SamplingRule(temperature=1.0, top_p=1.0)
GREEDY = SamplingRule(temperature=0.0, top_p=1.0)
KEY = MarkKey(1, bytes(range(32)))


def tail_of_chi_square(counts, expected):
    """Return the probability of so large a distance, or a larger one."""
    distance = sum((counts.get(cell, 0) - mean) ** 2 / mean for cell, mean in expected.items())
    return 1 - float(torch.special.gammainc(torch.tensor((len(expected) - 1) / 2.0), torch.tensor(distance / 2)))


def keys_of(count, seed):
    """Keys that a fixed seed decides, so that a test has one outcome."""
    content = torch.randint(0, 256, (count, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return [MarkKey(1, bytes(row)) for row in content.tolist()]


@pytest.mark.parametrize("rule", [RULE, SamplingRule(temperature=0.7, top_k=5, top_p=1.0)])
def test_the_marginal_over_100_000_keys_is_the_models_distribution(rule):
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, 0.0, -1.0, -2.0, -3.0])
    keys = keys_of(100_000, 0)
    rows = torch.tensor([mark_row_key(key, 0, (5, 6, 7, 8)) for key in keys])

    tokens, _ = draw_tokens(logits.repeat(len(keys), 1), rows, rule)

    scaled = logits / rule.temperature
    kept = scaled.topk(rule.top_k or 8).indices
    shares = dict(zip(kept.tolist(), scaled[kept].softmax(0).tolist(), strict=True))
    counts = Counter(tokens.tolist())
    assert counts.keys() <= shares.keys()
    assert tail_of_chi_square(counts, {cell: share * len(keys) for cell, share in shares.items()}) > 1e-3


def write(draws, length, next_logits):
    """Write texts side by side; the logits depend on the last token."""
    texts = [[] for _ in draws]
    for _ in range(length):
        tokens, _ = draw_next(draws, torch.stack([next_logits(text) for text in texts]))
        for text, token in zip(texts, tokens.tolist(), strict=True):
            text.append(token)
    return texts


def sticky(text):
    """A model of two tokens that likes to repeat itself: contexts come again at once."""
    return torch.tensor([1.5, 0.0]) if not text or text[-1] == 0 else torch.tensor([0.0, 1.0])


def sequence_shares(length):
    shares = {}
    for cells in itertools.product((0, 1), repeat=length):
        logprob = sum(float(sticky(cells[:n]).log_softmax(0)[cell]) for n, cell in enumerate(cells))
        shares[cells] = math.exp(logprob)
    return shares


class Forgetful(TextDraw):
    """The attack on quality: contexts are used again, as in a mark without deduplication."""

    def take_token(self, token):
        super().take_token(token)
        self._seen.clear()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_exact"), [(TextDraw, True), (Forgetful, False)])
def test_whole_texts_have_the_models_distribution_because_no_context_is_used_twice(kind, is_exact):
    length, count = 7, 20_000
    draws = [kind(RULE, number, 0, key, "gumbel") for number, key in enumerate(keys_of(count, 1))]

    counts = Counter(map(tuple, write(draws, length, sticky)))

    expected = {cells: share * count for cells, share in sequence_shares(length).items()}
    p_value = tail_of_chi_square(counts, expected)
    assert p_value > 1e-3 if is_exact else p_value < 1e-6


def flat(text):
    return torch.zeros(50)


def test_samples_of_one_request_and_requests_of_other_seeds_differ():
    mark = TokenMark(MarkPolicy(), KEY)
    texts = write([mark.begin_text(RULE, seed=7, sample=n) for n in range(2 * LANES)], 20, flat)
    others = write([mark.begin_text(RULE, seed=n) for n in (7, 8)], 20, flat)

    assert len(set(map(tuple, texts))) == 2 * LANES
    assert others[0] == texts[0] != others[1]


def test_samples_with_one_beginning_go_on_differently():
    draws = [TokenMark(MarkPolicy(), KEY).begin_text(RULE, seed=0, sample=n) for n in range(LANES)]
    for draw in draws:
        for token in (1, 2, 3, 4):
            draw.take_token(token)

    assert len(set(map(tuple, write(draws, 20, flat)))) == LANES


def test_a_batch_has_the_tokens_of_single_draws_and_rows_may_have_different_rules():
    mark = TokenMark(MarkPolicy(), KEY)
    rules = [RULE, GREEDY, SamplingRule(temperature=0.5, top_p=0.9), RULE]
    together = write([mark.begin_text(rule, seed=n) for n, rule in enumerate(rules)], 12, flat)

    for number, rule in enumerate(rules):
        draw, alone = mark.begin_text(rule, seed=number), []
        for _ in range(12):
            token, name = mark.draw_token(flat(alone), draw)
            alone.append(token)
        assert alone == together[number]
        assert name == ("bias" if rule is GREEDY else "gumbel")
        assert draw.num_marked == 8


def test_greedy_text_is_biased_by_no_more_than_the_policy_says():
    generator = torch.Generator().manual_seed(0)
    mark = TokenMark(MarkPolicy(bias=1.5), KEY)
    draw = mark.begin_text(GREEDY, seed=0)
    gaps = []
    for _ in range(200):
        logits = 2 * torch.randn(50, generator=generator)
        token, name = mark.draw_token(logits, draw)
        gaps.append(float(logits.max() - logits[token]))
        assert name == "bias"

    assert gaps[:4] == [0.0] * 4
    assert 0.0 < max(gaps) <= 1.5


@pytest.mark.parametrize(
    ("policy", "asked", "name"),
    [
        (MarkPolicy(mark="off"), {}, "no (off)"),
        (MarkPolicy(), {}, "gumbel"),
        (MarkPolicy(), {"wants_mark": False, "may_skip": True}, "no (caller)"),
        (MarkPolicy(greedy="plain"), {"rule": GREEDY}, "no (greedy)"),
        (MarkPolicy(), {"rule": GREEDY}, "bias"),
        (MarkPolicy(mark="required"), {"rule": GREEDY}, "bias"),
        (MarkPolicy(), {"wants_mark": False}, None),
        (MarkPolicy(mark="required"), {"wants_mark": False, "may_skip": True}, None),
        (MarkPolicy(greedy="refuse"), {"rule": GREEDY}, None),
    ],
)
def test_a_text_says_how_it_is_marked_or_is_refused(policy, asked, name):
    mark = TokenMark(policy, KEY)
    call = {"rule": RULE, "seed": 0} | asked
    if name is None:
        with pytest.raises(MarkRefused):
            mark.begin_text(**call)
    else:
        draw = mark.begin_text(**call)
        assert draw.mark_name == name
        write([draw], 10, flat)
        assert bool(draw.num_marked) == (not name.startswith("no"))


def test_a_policy_that_marks_needs_a_key_and_contradictions_are_refused():
    with pytest.raises(ConfigError, match="needs a key file"):
        TokenMark(MarkPolicy(), None)
    with pytest.raises(ValidationError, match="exclude each other"):
        MarkPolicy(mark="required", greedy="plain")


def test_a_grammar_narrows_the_race_and_one_without_a_way_on_is_refused():
    mark = TokenMark(MarkPolicy(), KEY)
    allowed = torch.zeros(50, dtype=torch.bool)
    allowed[[3, 4]] = True
    for rule in (RULE, GREEDY, SamplingRule(top_k=1, top_p=0.5)):
        draw = mark.begin_text(rule, seed=0)
        assert {mark.draw_token(flat([]), draw, allowed)[0] for _ in range(30)} <= {3, 4}
        with pytest.raises(ModelError, match="no token is allowed"):
            mark.draw_token(flat([]), draw, torch.zeros(50, dtype=torch.bool))


def test_a_secret_is_never_shown():
    key = MarkKey(1, secrets.token_bytes(32))

    assert key.secret.hex() not in repr(key)
    assert repr(key.secret)[2:-1] not in repr(key)


def test_an_auditor_with_the_key_convicts_a_server_that_took_another_token():
    mark = TokenMark(MarkPolicy(), KEY)
    served, audited = mark.begin_text(RULE, seed=3), mark.begin_text(RULE, seed=3)
    logits = 2 * torch.randn((30, 50), generator=torch.Generator().manual_seed(1))
    tokens, row_keys = [], []
    for row in logits:
        row_keys.append(audited.next_key()[0])
        tokens.append(mark.draw_token(row, served)[0])
        audited.take_token(tokens[-1])
    swapped = [*tokens[:20], (tokens[20] + 1) % 50, *tokens[21:]]

    checks = [
        check_draws(logits, torch.tensor(row_keys), torch.tensor(claimed), RULE, 1e-3) for claimed in (tokens, swapped)
    ]

    assert float(checks[0].margins.max()) == 0.0
    assert checks[1].differs.nonzero().flatten().tolist() == [20]
    assert float(checks[1].margins[20]) > 1e-2
