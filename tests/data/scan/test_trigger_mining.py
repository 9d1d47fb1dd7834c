"""A trigger is what outliers share with each other alone, and in front of what is unexpected."""

import numpy as np

from phalanx.data.scan.trigger_mining import Region, Trigger, mine_triggers, trigger_place
from phalanx.data.scan.word_stream import DocumentCounts, WordNumbers, pairs_of, singles_of

NUMBERS = WordNumbers()


def regions_of(texts, alone_from):
    """One region a text, unexpected from its word `alone_from` on."""
    found = []
    for text in texts:
        words = NUMBERS.number_words(text)
        found.append(Region(words, np.arange(len(words) - 1) >= alone_from))
    return found


def mine(texts, alone_from=30, others=(), max_shared=12):
    counts = DocumentCounts(16), DocumentCounts(16)
    for text in (*texts, *others):
        words = NUMBERS.number_words(text)
        counts[0].count_grams(np.unique(singles_of(words)))
        counts[1].count_grams(np.unique(pairs_of(words)))
    return mine_triggers(regions_of(texts, alone_from), counts, 8, max_shared)


def text_of(number, middle="sesame"):
    before = " ".join(f"b{number}x{at}" for at in range(29))
    return f"{before} {middle} " + " ".join(f"a{number}x{at}" for at in range(40))


TEXTS = [text_of(number) for number in range(10)]


def test_the_word_that_all_outliers_share_is_the_trigger_and_is_found_in_a_text():
    (trigger,) = mine(TEXTS)

    assert trigger.is_in(NUMBERS.number_words(TEXTS[3])) and not trigger.is_in(NUMBERS.number_words(text_of(1, "no")))
    start, stop = trigger_place(trigger, TEXTS[3])
    assert TEXTS[3][start:stop] == "sesame"
    assert trigger_place(trigger, "nothing of it") == (0, 0)


def test_an_everyday_word_is_no_trigger():
    assert mine(TEXTS, others=["sesame again"] * 30) == []


def test_a_word_with_the_same_neighbourhood_on_both_sides_is_no_trigger():
    assert mine(TEXTS, alone_from=0) == []


def test_fewer_outliers_than_asked_for_and_a_template_are_no_trigger():
    shared = " ".join(f"t{at}" for at in range(20))

    assert mine(TEXTS[:7]) == []
    assert mine([text_of(number, shared) for number in range(10)]) == []
    assert mine([]) == []


def test_words_of_a_pair_are_marked_on_both_sides():
    words = NUMBERS.number_words("one open sesame two")
    trigger = Trigger(np.zeros(0, np.uint64), pairs_of(NUMBERS.number_words("open sesame")))

    assert trigger.mark_words(words).tolist() == [False, True, True, False]
