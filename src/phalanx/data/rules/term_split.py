"""How a piece of text between two white spaces becomes terms: the convention that published thresholds were set on.

Gopher's and FineWeb's thresholds are shares of words, and the public pipelines count words as spaCy's English rules do:
punctuation at both ends is cut off character by character, contractions are split (``do|n't``), letters are split at
hyphens, slashes and commas between them, and an address stays whole. These are our own rules to the same effect; how
often they agree is measured (docs/data_rules.md). Every loop is linear in the piece: the text is not trusted.
"""

import re
import unicodedata

_OPENERS = frozenset(
    "§%=—–…,:;!?¿؟¡()[]{}<>_#*&。？！，、；：～·।،۔؛٪'\"”“`‘´’‚„»«「」『』（）〔〕【】《》〈〉⟦⟧$£€¥฿₽﷼₴₹₩₪₫₿"
)
_CLOSERS = (_OPENERS - frozenset("§%=$£€¥฿₽﷼₴₹₩₪₫₿")) | frozenset("—–")
_QUOTES = "'\"”“`‘´’‚,„»«「」『』（）〔〕【】《》〈〉⟦⟧"
_ICONS = (
    "\u00a6\u00a9\u00ae\u00b0\u2117\u2122\ufffd\u2195-\u2199\u21a9-\u21aa\u2300-\u2307\u2322-\u2328"
    "\u2400-\u2426\u249c-\u24e9\u2500-\u25b6\u25b8-\u25c0\u25c2-\u266e\u2670-\u2767\u2794-\u27bf"
    "\u2800-\u28ff\u2b00-\u2b2f\U0001f000-\U0001faff"
)
_INFIX = re.compile(
    r"\.\.+|…"
    rf"|[{_ICONS}]"
    r"|(?<=[0-9])[+\-*^](?=[0-9-])"
    rf"|(?<=[^\W\d_])\.(?=[^\W\d_{_QUOTES}]|[{_QUOTES}])|(?<=[{_QUOTES}])\.(?=[^\W\d_]|[{_QUOTES}])"
    r"|(?<=[^\W\d_]),(?=[^\W\d_])"
    r"|(?<=[^\W_])(?:-{1,3}|–|——?|~)(?=[^\W\d_])"
    r"|(?<=[^\W_])[:<>=/](?=[^\W\d_])"
)
_UNIT = re.compile(
    r"(?<=[0-9])(?:[kdcmnµ]?m[²³]?|ha|yd|in|ft|[kmµ]?g|t|lb|oz|[mk]m/[sh]|kmh|mph|h?Pa|mbar|[mM]b|MB|[kK][bB]|[gG][bB]"
    r"|[tT][bB]|T|G|M|K|%|[$£€¥฿])$"
)
_HOST_END = re.compile(r"[^\W\d_A-Z]{2,63}(?::[0-9]{2,5})?$")
_LABEL = re.compile(r"[A-Za-z0-9\u00a1-\uffff](?:[A-Za-z0-9\u00a1-\uffff_-]{0,62}[A-Za-z0-9\u00a1-\uffff])?$")
_IPV4 = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?::[0-9]{2,5})?$")


def _contraction_table() -> dict[str, tuple[str, ...]]:
    """Every contraction that is split, in lower case and with a capital, with and without its apostrophe."""
    ends = {
        "i": "'m 'll 'd 've",
        "you": "'ll 'd 've 're",
        "he": "'ll 'd 's",
        "she": "'ll 'd 's",
        "it": "'ll 'd 's",
        "we": "'ll 'd 've 're",
        "they": "'ll 'd 've 're",
        **dict.fromkeys(("who", "what", "when", "where", "why", "how", "there", "that"), "'s 'll 're 've 'd"),
        "this": "'s 'll 'd",
        "these": "'ll 're 've 'd",
        "those": "'ll 're 've 'd",
        **dict.fromkeys(("could", "might", "must", "should", "would"), "'ve"),
    }
    negated = "ca could do does did had may might must need ought sha should wo would ai are is was were have has dare"
    splits: dict[str, tuple[str, ...]] = {}
    for stem, tails in ends.items():
        for tail in tails.split():
            splits[stem + tail] = (stem, tail)
            splits[stem + tail[1:]] = (stem, tail[1:])
            if tail in ("'ll", "'d"):
                splits[f"{stem}{tail}'ve"] = (stem, tail, "'ve")
    for stem in negated.split():
        splits[stem + "n't"], splits[stem + "nt"] = (stem, "n't"), (stem, "nt")
        splits[stem + "n't've"] = (stem, "n't", "'ve")
    splits |= {"cannot": ("can", "not"), "gonna": ("gon", "na"), "gotta": ("got", "ta"), "let's": ("let", "'s")}
    for word in ("ill", "its", "hell", "shell", "shed", "were", "well"):
        splits.pop(word, None)
    splits |= {key.replace("'", "’"): tuple(part.replace("'", "’") for part in parts) for key, parts in splits.items()}
    capital = {key.capitalize(): (parts[0].capitalize(), *parts[1:]) for key, parts in splits.items()}
    times = {f"{hour}{half}": (str(hour), half) for hour in range(1, 13) for half in ("am", "pm", "a.m.", "p.m.")}
    return splits | capital | times


_WHOLE_TEXT = """
Mr. Mrs. Ms. Dr. Prof. Rev. Gen. Gov. Sen. Rep. Adm. Jr. Messrs. Mt. St. Inc. Ltd. Co. co. Corp. Bros. vs. v.s.
e.g. E.g. E.G. i.e. I.e. I.E. a.m. p.m. Ph.D. D.C. Jan. Feb. Mar. Apr. Jun. Jul. Aug. Sep. Sept. Oct. Nov. Dec.
Md. Mo. Mont. Ak. Ala. Ariz. Ark. Calif. Colo. Conn. Del. Fla. Ga. Ia. Id. Ill. Ind. Kan. Kans. Ky. La. Mass.
Mich. Minn. Miss. N.C. N.D. N.H. N.J. N.M. N.Y. Neb. Nebr. Nev. Okla. Ore. Pa. S.C. Tenn. Va. Wash. Wis. C++
and/or w/o 'd 's 'S 're 'em 'll ma'am Ma'am o'clock O'clock 'cause 'Cause 'cos 'bout
"""
_WHOLE = frozenset(_WHOLE_TEXT.split()) | frozenset(f"{letter}." for letter in "abcdefghijklmnopqrstuvwxyzäöü")
_FACES_TEXT = """
:) :-) :)) (: =) (= :] :-] [: =] [= :o) :} 8) 8-) ;) ;-) (; :( :-( :(( ): =( >:( :/ :-/ =/ =| :| ]= :1 :P :p :O
:o :0 :() :* :3 =3 :> :X :x :D ;D =D xD XD 8D ^_^ >.< >.> <.< ._. -_- v.v o.O O.o O.O o.o 0.0 o.0 0.o <3 </3 ''
\\n \\t
"""
_FACES = frozenset(_FACES_TEXT.split())
"""Kept whole, wherever their characters come out as terms of their own side by side."""
_CONTRACTIONS = _contraction_table()
_MAX_SPECIAL_LENGTH = 12


def split_piece(piece: str) -> list[str]:
    """Split text without white space into terms."""
    head, (start, stop), tail = _peel_ends(piece)
    middle = piece[start:stop]
    terms = [*head, *_split_middle(middle), *reversed(tail)] if middle else [*head, *reversed(tail)]
    return _join_faces(terms) if len(terms) > 1 else terms


def _is_special(text: str) -> bool:
    return text in _CONTRACTIONS or text in _WHOLE or text in _FACES


def _peel_ends(piece: str) -> tuple[list[str], tuple[int, int], list[str]]:
    """Cut off the terms at the ends: those in front, the rest, and those behind from the end inwards."""
    head: list[str] = []
    tail: list[str] = []
    start, stop = 0, len(piece)
    while start < stop:
        if stop - start <= _MAX_SPECIAL_LENGTH and _is_special(piece[start:stop]):
            break
        front = _opening_length(piece, start, stop)
        if front:
            head.append(piece[start : start + front])
            start += front
            if stop - start <= _MAX_SPECIAL_LENGTH and _is_special(piece[start:stop]):
                break
        back = _closing_length(piece, start, stop)
        if back:
            tail.append(piece[stop - back : stop])
            stop -= back
        if not front and not back:
            break
    return head, (start, stop), tail


def _opening_length(piece: str, start: int, end: int) -> int:
    """How many characters at the start are a term of their own."""
    first = piece[start]
    if first.isalnum():
        return 0
    if first == ".":
        return _run_of_dots(piece, start, end, 1)
    if first == "+":
        return int(not (start + 1 < end and piece[start + 1].isdigit()))
    return int(first in _OPENERS or _is_icon(first))


def _closing_length(piece: str, start: int, end: int) -> int:
    """How many characters at the end are a term of their own."""
    last, before = piece[end - 1 : end], piece[end - 2 : end - 1] if end - 2 >= start else ""
    if start >= end or last.isdigit():
        return 0
    if last == ".":
        return _closing_dots(piece, start, end)
    if last in "sS" and before and before in "'’":
        return 2
    if last in _CLOSERS or _is_icon(last) or (last == "+" and before.isdigit()):
        return 1
    unit = _UNIT.search(piece, max(start, end - 6), end)
    return unit.end() - unit.start() if unit else 0


def _closing_dots(piece: str, start: int, end: int) -> int:
    dots = _run_of_dots(piece, end - 1, start - 1, -1)
    if dots:
        return dots
    before = piece[end - 2] if end - 2 >= start else ""
    if not before:
        return 0
    if before.isdigit() or before in "%²-+" or before in _CLOSERS or (before.isalpha() and not before.isupper()):
        return 1
    return int(before.isupper() and end - 3 >= start and piece[end - 3].isupper())


def _run_of_dots(piece: str, place: int, until: int, step: int) -> int:
    count = 0
    while place != until and piece[place] == ".":
        count, place = count + 1, place + step
    return count if count > 1 else 0


def _is_icon(char: str) -> bool:
    return char > "\xa0" and unicodedata.category(char) == "So"


def _split_middle(text: str) -> list[str]:
    """Split the rest between the ends, unless it is known as a whole."""
    if text in _CONTRACTIONS:
        return list(_CONTRACTIONS[text])
    if len(text) <= _MAX_SPECIAL_LENGTH and _is_special(text):
        return [text]
    cuts = [match.span() for match in _INFIX.finditer(text) if match[0] != "." or _is_sentence_dot(text, match.start())]
    if not cuts or _is_address(text):
        return [text]
    parts, position = [], 0
    for begin, stop in cuts:
        if begin == 0:
            continue
        if begin > position:
            parts.append(text[position:begin])
        parts.append(text[begin:stop])
        position = stop
    return [*parts, text[position:]] if position < len(text) else parts


def _is_sentence_dot(text: str, at: int) -> bool:
    before, after = text[at - 1], text[at + 1]
    return not before.isupper() and not after.islower()


def _is_address(text: str) -> bool:
    """Whether this is a URL, a host with or without a path, or a mail address."""
    scheme, separator, rest = text.partition("://")
    if not separator or not re.fullmatch(r"[\w+\-.]{2,}", scheme):
        rest = text
    rest = rest.rpartition("@")[2]
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if _IPV4.match(host):
        return True
    labels = host.split(".")
    return len(labels) > 1 and bool(_HOST_END.match(labels[-1])) and all(map(_LABEL.match, labels[:-1]))


def _join_faces(words: list[str]) -> list[str]:
    if not any(len(term) == 1 and not term.isalnum() for term in words):
        return words
    joined: list[str] = []
    position = 0
    while position < len(words):
        for count in (3, 2):
            face = "".join(words[position : position + count])
            if position + count <= len(words) and len(face) <= 4 and face in _FACES:
                joined.append(face)
                position += count
                break
        else:
            joined.append(words[position])
            position += 1
    return joined
