"""Twelve makes of tokenizers with their chat templates, in the hub's layout, as public model families have them."""

# ruff: noqa: E501 - templates stand as their families write them

import json
from dataclasses import dataclass

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

_WORDS = "the and water question answer river be brief you are a an is of to in user assistant system tool call port"
_NAMES = "Brest Mars Venus Hello Which planet red Let me look High name value type function"
_JOINED = [*_WORDS.split(), *_NAMES.split(), "12", "34", "...", "ing", "er", "st"]
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _chains(words, space):
    """Merges that make each word, and each behind a space, out of its letters from left to right."""
    merges = []
    for word in words:
        for letters in (space + word, word):
            merges += [(letters[:at], letters[at]) for at in range(1, len(letters))]
    return list(dict.fromkeys(merges))


def _bpe(alphabet, merges, **settings):
    vocab = {}
    for token in (*alphabet, *(left + right for left, right in merges)):
        vocab.setdefault(token, len(vocab))
    return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **settings))


def _byte_level(pattern, *, trims=False, normalizer=None):
    runs = [("Ċ", "Ċ"), ("Ġ", "Ġ"), ("ĠĠ", "Ġ"), ("Ċ", "Ġ"), ("ĊĠ", "Ġ"), (")", "Ċ"), (".", "Ċ"), ("Ã", "©")]
    made = _bpe(sorted(pre_tokenizers.ByteLevel.alphabet()), [*_chains(_JOINED, "Ġ"), *runs])
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.post_processor = processors.ByteLevel(trim_offsets=trims)
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def _pieces():
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;?!'\"()[]{}<>|/_-=+*#@&%$^~`\\\n"
    alphabet = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    runs = [("▁", "▁"), ("▁▁", "▁▁"), ("\n", "\n"), (".", "▁"), (":", "▁")]
    return _bpe(alphabet, [*_chains(_JOINED, "▁"), *runs], unk_token="<unk>", byte_fallback=True)


def _prepended():
    """As Llama 2's: a normalizer writes the first space."""
    made = _pieces()
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def _metaspace(scheme):
    made = _pieces()
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    return made


def _replaced():
    """As Gemma's: spaces are a letter, and none is written first."""
    made = _pieces()
    made.normalizer = normalizers.Replace(" ", "▁")
    return made


def _unigram():
    """As T5's: whole words after NFKC, the end of text behind every text."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;?!'\"()[]{}<>|/_-=+*\n"
    scores = [("<unk>", 0.0), ("▁", -2.0), *((one, -6.0) for one in letters)]
    scores += [(form, -4.0) for word in dict.fromkeys(_JOINED) for form in (word, f"▁{word}") if len(form) > 1]
    made = tokenizers.Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=False))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    return made


_CHATML = (
    "{%- if tools %}{{ '<|im_start|>system\n# Tools\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{%- if m['role'] == 'assistant' %}[GEN]{{ m['content'] or '' }}"
    "{%- for c in m['tool_calls'] or [] %}{{ '<tool_call>' + (c['function'] | tojson) + '</tool_call>' }}{%- endfor %}"
    "{{ '<|im_end|>' }}[END]{%- else %}{{ (m['content'] or '') + '<|im_end|>' }}{%- endif %}{{ '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
_SMOLLM = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n' }}{% endif %}"
    "{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}[GEN]{{ m['content'] + '<|im_end|>' }}[END]{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_QWEN3 = (
    "{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif %}"
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}[GEN]"
    "{%- if m.reasoning_content is string and loop.index0 > ns.last %}"
    "{{ '<think>\n' + m.reasoning_content.strip() + '\n</think>\n\n' }}{%- endif %}"
    "{{ m.content if m.content is string else '' }}"
    "{%- for c in m.tool_calls or [] %}{{ '\n<tool_call>\n' + (c.function | tojson) + '\n</tool_call>' }}{%- endfor %}"
    "{{ '<|im_end|>' }}[END]{{ '\n' }}"
    "{%- elif m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
_LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{% if m['role'] == 'assistant' %}[GEN]{{ (m['content'] or '') | trim }}"
    "{% for c in m['tool_calls'] or [] %}{{ c['function'] | tojson }}{% endfor %}{{ '<|eot_id|>' }}[END]"
    "{% else %}{{ (m['content'] | trim) + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '') + m['content'].strip() + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}[GEN]{{ ' ' + m['content'].strip() + ' ' + eos_token }}[END]{% endif %}{% endfor %}"
)
_MISTRAL = (
    "{{ bos_token }}{% if tools %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + '[/INST]' }}"
    "{% elif m['role'] == 'system' %}{{ '[INST] ' + m['content'] + '\n\n[/INST]' }}"
    "{% elif m['role'] == 'tool' %}{{ '[TOOL_RESULTS] ' + m['content'] + '[/TOOL_RESULTS]' }}"
    "{% else %}[GEN]{{ ' ' + (m['content'] or '') }}"
    "{% for c in m['tool_calls'] or [] %}{{ '[TOOL_CALLS] ' + (c['function'] | tojson) }}{% endfor %}"
    "{{ eos_token }}[END]{% endif %}{% endfor %}"
)
_GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'assistant' %}{{ '<start_of_turn>model\n' }}[GEN]{{ (m['content'] | trim) + '<end_of_turn>' }}[END]{{ '\n' }}"
    "{% else %}{{ '<start_of_turn>' + m['role'] + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_PHI3 = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|assistant|>\n' }}[GEN]{{ m['content'] + '<|end|>' }}[END]{{ '\n' }}"
    "{% else %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_ZEPHYR = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|assistant|>\n' }}[GEN]{{ m['content'] + eos_token }}[END]"
    "{% else %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] + '<｜Assistant｜>' }}"
    "{% elif m['role'] == 'assistant' %}[GEN]{{ m['content'] or '' }}"
    "{% for c in m['tool_calls'] or [] %}{{ '<｜tool｜>' + c['function']['name'] + ' ' + (c['function']['arguments'] | tojson) }}{% endfor %}"
    "{{ eos_token }}[END]{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
_TEXT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ 'assistant:' }}[GEN]{{ ' ' + m['content'] + eos_token }}[END]{{ '\n' }}"
    "{% else %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@dataclass(frozen=True)
class Make:
    """A tokenizer with its chat template.

    Attributes:
        backend: Of the tokenizers library, special tokens included.
        template: With ``[GEN]`` and ``[END]`` around what the assistant writes.
        begin: The token before every text, where there is one.
        end: The token that ends a text.
    """

    backend: tokenizers.Tokenizer
    template: str
    begin: str | None
    end: str

    @property
    def plain_template(self):
        """As the hub has it: nothing says what the assistant writes."""
        return self.template.replace("[GEN]", "").replace("[END]", "")

    @property
    def marked_template(self):
        """The same text, with what the assistant writes marked for transformers."""
        return self.template.replace("[GEN]", "{% generation %}").replace("[END]", "{% endgeneration %}")

    def write(self, directory):
        """Write the files of the hub's layout."""
        directory.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(directory / "tokenizer.json"))
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.end, "pad_token": self.end}
        named |= {} if self.begin is None else {"bos_token": self.begin}
        (directory / "tokenizer_config.json").write_text(json.dumps({**named, "chat_template": self.plain_template}))


def _make(backend, template, end, begin=None, marks=(), *, writes_end=False):
    backend.add_special_tokens([end, *([begin] if begin else []), *marks])
    if begin or writes_end:
        around = [*([f"{begin}"] if begin else []), "$A", *([end] if writes_end else [])]
        special = [(one, backend.token_to_id(one)) for one in (begin, end) if one]
        frame = processors.TemplateProcessing(single=" ".join(around), special_tokens=special)
        trims = backend.post_processor
        backend.post_processor = frame if trims is None else processors.Sequence([trims, frame])
    return Make(backend, template, begin, end)


_IM = ("<|im_start|>", "<|im_end|>")
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_TOOLS = (
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
_TURNS = ("<start_of_turn>", "<end_of_turn>")
_PHI = ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>")
_BARS = ("<｜User｜>", "<｜Assistant｜>", "<｜tool｜>")

MAKES = {
    "gpt2": _make(_byte_level(_GPT2), _TEXT, "<|endoftext|>"),
    "smollm2": _make(_byte_level(_GPT2), _SMOLLM, "<|endoftext|>", marks=_IM),
    "qwen2": _make(_byte_level(_LLAMA3, normalizer=normalizers.NFC()), _CHATML, "<|im_end|>", marks=_IM[:1]),
    "qwen3": _make(_byte_level(_LLAMA3, normalizer=normalizers.NFC()), _QWEN3, "<|endoftext|>", marks=_IM),
    "llama3": _make(
        _byte_level(_LLAMA3, trims=True), _LLAMA3_TEMPLATE, "<|end_of_text|>", "<|begin_of_text|>", _HEADERS
    ),
    "llama2": _make(_prepended(), _LLAMA2, "</s>", "<s>"),
    "mistral": _make(_metaspace("first"), _MISTRAL, "</s>", "<s>", _TOOLS),
    "gemma": _make(_replaced(), _GEMMA, "<eos>", "<bos>", _TURNS),
    "phi3": _make(_prepended(), _PHI3, "<|endoftext|>", "<s>", _PHI),
    "zephyr": _make(_metaspace("always"), _ZEPHYR, "</s>", "<s>"),
    "deepseek": _make(_byte_level(_LLAMA3, trims=True), _DEEPSEEK, "<｜end｜>", "<｜begin｜>", _BARS),
    "unigram": _make(_unigram(), _TEXT, "</s>", writes_end=True),
}
