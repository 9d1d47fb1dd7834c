"""Text comes out of tokens whole, whatever the tokens are cut at, and stops where a stop sequence begins."""

import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from phalanx.serve.engine import TokenScore
from phalanx.serve.engine.text_assembler import TextAssembler, TokenNames
from tiny_served import END, make_tokenizer

TOKENIZER = make_tokenizer()
SIZE = TOKENIZER.get_vocab_size()
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
FALLBACK = tokenizers.Tokenizer(tokenizers.models.BPE({**BYTES, "\u2581the": 256, "b": 257}, [], byte_fallback=True))
FALLBACK.decoder = tokenizers.decoders.Sequence(
    [
        tokenizers.decoders.Replace("\u2581", " "),
        tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(),
        tokenizers.decoders.Strip(" ", 1, 0),
    ]
)
IDS = st.lists(st.integers(0, SIZE - 1), max_size=40)


def write(ids, stops=(), backend=TOKENIZER):
    """The text, its pieces, the tokens whose scores came out, and the stop sequence."""
    writer, pieces, scored = TextAssembler(backend, stops), [], []
    for token in ids:
        text, scores = writer.feed_token(TokenScore(token, 0.0))
        pieces.append(text)
        scored += [score.token for score in scores]
        if writer.stop is not None:
            break
    text, scores = writer.close()
    return "".join([*pieces, text]), pieces, scored + [score.token for score in scores], writer.stop


@given(IDS)
def test_pieces_of_any_tokens_join_to_their_text(ids):
    text, _, scored, _ = write(ids)

    assert text == TOKENIZER.decode(ids, skip_special_tokens=True)
    assert scored == ids


@given(st.lists(st.sampled_from([9, 0xC3, 0xA9, 256, 257]) | st.integers(0, 257), max_size=40))
@example([9, 0xE6, 257])
def test_bytes_that_make_earlier_bytes_invalid_change_no_text_that_is_out(ids):
    """Vocabularies that spell in bytes decode a run of them anew with each further one."""
    text, _, scored, _ = write(ids, backend=FALLBACK)

    assert scored == ids
    whole = FALLBACK.decode(ids)
    assert text == whole or "\ufffd" in whole


@given(st.text(max_size=30))
def test_the_text_that_was_encoded_comes_back(text):
    assert write(TOKENIZER.encode(text).ids)[0] == text.replace(END, "")


@given(st.text(alphabet="abé ", max_size=30), st.lists(st.text(alphabet="abé ", min_size=1, max_size=3), max_size=3))
def test_a_text_ends_where_its_first_stop_sequence_begins(text, stops):
    written, _, _, stop = write(TOKENIZER.encode(text).ids, stops)

    places = [text.find(one) for one in stops if one in text]
    if places:
        # one that is complete earlier may begin later, as "b" in "ab" does before "abé"
        assert stop in stops
        assert text.startswith(written + stop)
        assert not any(one in written for one in stops)
    else:
        assert (written, stop) == (text, None)


def test_nothing_of_a_stop_sequence_is_shown_before_it_is_decided():
    _, pieces, _, stop = write(TOKENIZER.encode("xx#y##z").ids, ["##"])

    assert stop == "##"
    assert "".join(pieces) == "xx#y"
    assert all("##" not in "".join(pieces[:count]) for count in range(len(pieces)))


def test_names_of_tokens_are_their_bytes():
    names = TokenNames(TOKENIZER)

    assert [names.bytes_of(token) for token in TOKENIZER.encode(" the é").ids] == [b" the", b" ", "é".encode()]
    assert names.bytes_of(TOKENIZER.token_to_id(END)) == END.encode()
    assert names.bytes_of(SIZE + 5) == b""
    assert {names.bytes_of(token) for token in range(256)} == {bytes([byte]) for byte in range(256)}
