"""Conversations become rows in which only the assistant's words are labels; what is left out is counted or named."""

import json

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from made_chat import TALK
from phalanx.data import IGNORE, BatchLoader, BpeConfig, DataConfig, prepare_corpus, validation_batches
from phalanx.data.chat.settings import ConversationsConfig, ConversationSource
from phalanx.errors import DataError

LENGTH = 96


def talk(number, **more):
    """A conversation of one turn each, other for each number."""
    return {"prompt": f"{number}+1?", "completion": str(number + 1), **more}


def config(path, *, attention="across", share=0.25, length=LENGTH, **more):
    """The section of a run file."""
    wanted = ConversationsConfig(sources=(ConversationSource(path=path),), **more)
    return DataConfig(
        conversations=wanted,
        tokenizer=BpeConfig(vocab_size=259),
        sequence_length=length,
        validation_share=share,
        attention=attention,
    )


@pytest.fixture
def written(tmp_path):
    """Write lines and return their file."""

    def write(*lines):
        path = tmp_path / "talks.jsonl"
        path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
        return path

    return write


def words(corpus, ids):
    """The text of ids."""
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(corpus.tokenizer_path)).decode(ids, skip_special_tokens=False)


@pytest.fixture
def corpus_of(tmp_path):
    """Prepare a section."""
    return lambda section, seed=1: prepare_corpus(section, tmp_path / "cache", seed)


def test_a_row_holds_one_conversation_and_its_labels_are_the_assistants(written, corpus_of):
    corpus = corpus_of(config(written(TALK, *map(talk, range(40)))))

    batch = corpus.train_batch(range(corpus.num_train_sequences))

    assert not batch.extras
    for ids, labels in zip(batch.input_ids, batch.labels, strict=True):
        there = labels != IGNORE
        assert torch.equal(labels[there], ids[1:][there[:-1]])
        said = words(corpus, labels[there].tolist())
        whole = words(corpus, ids.tolist())
        answers = [one.split("<|im_end|>")[0] for one in whole.split("<|im_start|>assistant\n")[1:]]
        assert said == "".join(f"{one}<|im_end|>" for one in answers)
    assert corpus.end_of_turn == 2


def test_a_file_that_changes_while_it_is_read_is_noticed(written, tmp_path):
    path = written(TALK, *map(talk, range(250)))

    def grow(phase, _):
        if phase == "read":
            written(TALK, *map(talk, range(40)))

    # the report comes every 200 conversations, while the file is still open
    with pytest.raises(DataError, match="a file changed while it was read; run again"):
        prepare_corpus(config(path), tmp_path / "cache", 1, progress=grow)


def test_packed_rows_hold_every_conversation_once_whole_and_apart(written, corpus_of):
    path = written(TALK, *map(talk, range(40)))

    alone, packed = corpus_of(config(path)), corpus_of(config(path, attention="document"))

    assert packed.num_train_sequences < alone.num_train_sequences / 2
    block, batch = set(), packed.train_batch(range(packed.num_train_sequences))
    for ids, labels, documents in zip(batch.input_ids, batch.labels, batch.extras["documents"], strict=True):
        for number in range(int(documents.max()) + 1):
            own = documents == number
            if (labels[own] != IGNORE).any():
                block.add((*ids[own].tolist(), *labels[own].tolist()))
    single = alone.train_batch(range(alone.num_train_sequences))
    sizes = [int((row != single.input_ids[0, -1]).nonzero().max()) + 1 for row in single.input_ids]
    expected = {
        (*ids[:size].tolist(), *labels[:size].tolist())
        for ids, labels, size in zip(single.input_ids, single.labels, sizes, strict=True)
    }
    assert block == expected
    assert packed.digest != alone.digest
    held = [np.concatenate([b.labels.numpy() for b in validation_batches(one, 4)]) for one in (alone, packed)]
    assert np.array_equal(*held)


def test_a_second_call_opens_the_first_ones_result_and_a_changed_byte_is_found(written, corpus_of, tmp_path):
    section = config(written(*map(talk, range(30))))
    first = corpus_of(section)

    assert corpus_of(section).digest == first.digest
    path = first.tokenizer_path.parent / "train.weights"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"train\.weights: has SHA-256 .* altered; .* delete"):
        corpus_of(section)


def test_weights_of_messages_come_beside_the_labels(written, corpus_of):
    lines = [talk(number, weight=0.5 if number % 2 else 1.0) for number in range(30)]
    corpus = corpus_of(config(written(*lines), weighted=True, share=0.0))

    batch = BatchLoader(corpus, 6, seed=1).next_batch()

    there = batch.labels != IGNORE
    assert batch.extras["weights"].dtype == torch.float32
    assert not batch.extras["weights"][~there].any()
    assert set(batch.extras["weights"][there].tolist()) == {0.5, 1.0}


BAD = '{"messages": [{"role": "narrator", "content": "a"}]}'
FORGED = {"prompt": "<|im_end|>", "completion": "a"}
LONG = {"prompt": "why " * 200, "completion": "so"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (BAD, r"talks.jsonl, line 3: turn 1: has the role 'narrator'"),
        ("{", r"talks.jsonl, line 3: is not JSON"),
        (FORGED, r"talks.jsonl, line 3: turn 1: holds '<\|im_end\|>'"),
        (LONG, r"talks.jsonl, line 3: has 8\d\d tokens, data.sequence_length is 96"),
        (talk(9, weight=0.5), r"talks.jsonl, line 3: has the weight 0.5; set data.conversations.weighted"),
        ({"messages": [{"role": "user", "content": "a"}]}, r"talks.jsonl, line 3: has no message of the assistant"),
    ],
    ids=["role", "json", "forged", "long", "weight", "no answer"],
)
def test_a_conversation_that_cannot_be_learned_is_named_by_file_and_line(written, corpus_of, line, message):
    with pytest.raises(DataError, match=message):
        corpus_of(config(written(talk(1), talk(2), line, talk(3), talk(4)), share=0.0))


def test_what_the_run_file_drops_is_counted_and_the_first_are_named(written, corpus_of):
    path = written(talk(1), BAD, talk(2), FORGED, LONG, talk(3))

    corpus = corpus_of(config(path, share=0.0, broken="drop", too_long="drop"))

    assert corpus.manifest.dropped == {"broken": 1, "not rendered": 1, "too long": 1}
    assert corpus.num_train_sequences == 3
    learned, left_out = corpus.user_notes
    assert learned.endswith("tokens in 3 conversations are learned, by the chat template chatml")
    assert "talks.jsonl, line 2: turn 1" in left_out
    assert "line 4: turn 1: holds" in left_out


def test_a_long_conversation_is_cut_where_the_run_file_says_so(written, corpus_of):
    long = {"prompt": "why?", "completion": "so " * 200}

    corpus = corpus_of(config(written(talk(1), long, LONG), share=0.0, too_long="cut"))

    batch = corpus.train_batch(range(corpus.num_train_sequences))
    assert corpus.manifest.dropped == {"nothing learned": 1}
    assert corpus.user_notes[1] == f"conversations cut to their first {LENGTH} tokens: 1"
    assert max(int((row != IGNORE).sum()) for row in batch.labels) > LENGTH // 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"packing": "best_fit"}, "packing is for text; conversations are packed by attention"),
        ({"repeats": {"a": 1.0}}, "repeats is for text"),
        ({"sources": ({"kind": "python_manual"},)}, "expected either sources, labelled, dataset"),
    ],
)
def test_keys_of_text_are_refused_beside_conversations(tmp_path, more, message):
    plain = config(tmp_path / "a.jsonl").model_dump()

    with pytest.raises(ValidationError, match=message):
        DataConfig.model_validate({**plain, **more}, strict=False)


def test_an_unknown_template_is_refused_by_name(tmp_path):
    with pytest.raises(ValidationError, match="template: unknown template 'chatmll'; expected model, chatml, plain"):
        config(tmp_path, template="chatmll")
