"""``phalanx bench mark-paraphrases``: the mark of the texts of ``bench marks`` after others have put them differently.

Three paraphrases keep each sentence and change it by rules; in one, a small model writes the text anew.
"""

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.lab.bench.measure.machine import bench_head, load_average
from phalanx.lab.bench.serving.mark_theory import drawn_keys
from phalanx.lab.bench.serving.marked_texts import ARMS, BatchWriter, WrittenText
from phalanx.lab.bench.serving.marks import MODEL, draw_prompts, open_writer
from phalanx.serve.marks import MarkKey, TextDraw, detect_mark
from phalanx.serve.sampling import SamplingRule

Row = dict[str, Any]
_ORDER = "Rewrite the following text in other words. Keep its meaning.\n\n"
_TEMPERATURE = 0.7
_SHARE_REWRITTEN = 0.8
"""Of each text, so that all of them have one length although tokens differ when they are read again."""
_PAIRS = """about:around also:too although:though always:constantly because:since began:started big:large but:yet
called:named can:may during:throughout each:every early:initial end:close family:household famous:renowned
found:discovered from:out_of good:fine great:grand has:possesses have:possess however:still important:key in:within
is:remains known:recognised large:sizeable last:final later:afterwards made:created many:numerous more:further
most:nearly_all new:recent next:following not:never often:frequently old:former on:upon one:a_single only:merely
over:across people:persons place:location said:stated several:some she:the_woman he:the_man show:reveal small:little
such:similar that:which they:these_people through:via time:period to:towards two:a_pair_of under:beneath until:till
used:employed very:quite was:had_been well:properly were:had_been when:as which:that while:whereas who:that
with:alongside work:labour year:twelvemonth"""
_SYNONYMS = dict(pair.split(":") for pair in _PAIRS.split())


def swap_words(text: str, _chance: random.Random) -> str:
    """Put a synonym from a table in the place of each word that it has."""
    return " ".join(_SYNONYMS.get(word.lower(), word).replace("_", " ") for word in text.split())


def turn_clauses(text: str, _chance: random.Random) -> str:
    """Put what stands behind the first comma of a sentence before it."""
    turned = []
    for sentence in _cut(text):
        head, _, rest = sentence.rstrip(".!?;").partition(", ")
        end = sentence[len(sentence.rstrip(".!?;")) :]
        turned.append(f"{rest}, {head}{end}" if rest else sentence)
    return " ".join(turned)


def shuffle_sentences(text: str, chance: random.Random) -> str:
    """Put the sentences of a text into another order."""
    sentences = _cut(text)
    chance.shuffle(sentences)
    return " ".join(sentences)


def _cut(text: str) -> list[str]:
    return [sentence for sentence in re.split(r"(?<=[.!?;])\s+", text) if sentence]


RULES: dict[str, Callable[[str, random.Random], str]] = {
    "none": lambda text, _: text,
    "sentences in another order": shuffle_sentences,
    "clauses turned": turn_clauses,
    "synonyms": swap_words,
    "synonyms, clauses turned": lambda text, chance: turn_clauses(swap_words(text, chance), chance),
}


def bench_paraphrases(quick: bool) -> Row:
    """Measure the rest of the mark in paraphrases."""
    load = load_average()
    writer, key = open_writer(), drawn_keys(1, 7)[0]
    prompts = draw_prompts(writer, 4 if quick else 32)
    (arm,) = [arm for arm in ARMS if arm.is_marked and arm.temperature == 1.0]
    texts = writer.write(prompts, arm.make_draws(key, len(prompts)), 40 if quick else 120)
    edited = {}
    for name, rule in RULES.items():
        chance = random.Random(0)  # noqa: S311 - a bench that can be run again
        edited[name] = [rule(text.text, chance) for text in texts]
    edited[f"written anew by {MODEL}"] = _rewrite(writer, texts)
    rows = [paraphrase_row(writer, name, texts, versions, key) for name, versions in edited.items()]
    return {**bench_head("mark-paraphrases", load, quick=quick), "model": MODEL, "rows": rows}


def _rewrite(writer: BatchWriter, texts: Sequence[WrittenText]) -> list[str]:
    """Let the same model write each text in other words, without a mark."""
    length = round(_SHARE_REWRITTEN * len(texts[0].tokens))
    before = writer.tokenize(f"<|im_start|>user\n{_ORDER}")
    behind = writer.tokenize("<|im_end|>\n<|im_start|>assistant\n")
    prompts = [[*before, *text.tokens[:length], *behind] for text in texts]
    rule = SamplingRule(temperature=_TEMPERATURE, top_p=1.0)
    draws = [TextDraw(rule, 5000 + number, 0, None, "rewritten", 0.0) for number in range(len(texts))]
    return [text.text for text in writer.write(prompts, draws, length)]


def paraphrase_row(
    writer: BatchWriter, name: str, texts: Sequence[WrittenText], versions: Sequence[str], key: MarkKey
) -> Row:
    """Look for the mark in each version; `kept_runs` is the share of its runs of five tokens that the text had."""
    tokens = [writer.tokenize(version) for version in versions]
    logs = sorted(detect_mark(ids, [key]).log10_p_value for ids in tokens)
    kept = total = 0
    for ids, text in zip(tokens, texts, strict=True):
        original = _runs(writer.tokenize(text.text))
        runs = _runs(ids)
        kept, total = kept + len(runs & original), total + len(runs)
    return {
        "paraphrase": name,
        "texts": len(texts),
        "kept_runs": kept / total if total else None,
        "found": sum(log <= -6 for log in logs),
        "at_0.01": sum(log <= -2 for log in logs),
        "median_log10_p": logs[len(logs) // 2],
    }


def _runs(ids: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(ids[place : place + 5]) for place in range(len(ids) - 4)}
