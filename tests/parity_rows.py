"""Awkward rows: conversations and texts as public data sets have them, each with two answers."""


def _user(content, **more):
    return {"role": "user", "content": content, **more}


def _assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def _call(port, content=None):
    function = {"name": "tide", "arguments": {"port": port}}
    return _assistant(content, tool_calls=[{"type": "function", "function": function}])


_TIDE = {
    "type": "function",
    "function": {
        "name": "tide",
        "description": "Tide table",
        "parameters": {"type": "object", "properties": {"port": {"type": "string"}}},
    },
}
_ASKED = [_user("Which planet is red?")]
_CODE = "def f(x):\n\treturn (x)\n\n\n    # 1234 + 5678\r\nx"
_WORLD = "e\u0301 \u00e9 \u6f22\u5b57 \U0001f6e1\ufe0f \u0627\u0644 \u2028 \u00a0 \ufb01"

ROWS = {
    "one turn": {"prompt": _ASKED, "chosen": [_assistant("Mars.")], "rejected": [_assistant("Venus.")]},
    "system": {
        "prompt": [{"role": "system", "content": "Be brief."}, *_ASKED],
        "chosen": [_assistant("Mars.")],
        "rejected": [_assistant("The planet is Venus.")],
    },
    "empty system": {
        "prompt": [{"role": "system", "content": ""}, *_ASKED],
        "chosen": [_assistant("Mars.")],
        "rejected": [_assistant("Venus.")],
    },
    "many turns": {
        "prompt": [_user("Hello"), _assistant("Hello!"), _user("Which planet?"), _assistant("Which?"), *_ASKED],
        "chosen": [_assistant("Mars.")],
        "rejected": [_assistant("Venus.")],
    },
    "tools in the prompt": {
        "tools": [_TIDE],
        "prompt": [_user("High water in Brest?")],
        "chosen": [_assistant("Let me look.")],
        "rejected": [_assistant("At 12.")],
    },
    "call with null content": {
        "tools": [_TIDE],
        "prompt": [_user("High water in Brest?")],
        "chosen": [_call("Brest")],
        "rejected": [_call("Brest, USA")],
    },
    "call, result, answer": {
        "tools": [_TIDE],
        "prompt": [_user("High water in Brest?"), _call("Brest", "Let me look."), {"role": "tool", "content": "14:05"}],
        "chosen": [_assistant("At 14:05.")],
        "rejected": [_assistant("At 12.")],
    },
    "reasoning": {
        "prompt": _ASKED,
        "chosen": [_assistant("Mars.", reasoning_content="Iron is red.")],
        "rejected": [_assistant("Venus.", reasoning_content="It is hot.")],
    },
    "earlier reasoning": {
        "prompt": [_user("Hello"), _assistant("Hello!", reasoning_content="A greeting."), *_ASKED],
        "chosen": [_assistant("Mars.")],
        "rejected": [_assistant("Venus.")],
    },
    "names": {
        "prompt": [_user("Which planet is red?", name="ann")],
        "chosen": [_assistant("Mars.")],
        "rejected": [_assistant("Venus.")],
    },
    "weights": {
        "prompt": [_user("Hello"), _assistant("Hello!", weight=0), *_ASKED],
        "chosen": [_assistant("Mars.", weight=1)],
        "rejected": [_assistant("Venus.", weight=1)],
    },
    "blanks around": {
        "prompt": [_user("  Which planet is red?\n\n")],
        "chosen": [_assistant("  Mars.  ")],
        "rejected": [_assistant("\nVenus.\n")],
    },
    "code": {"prompt": [_user(_CODE)], "chosen": [_assistant(_CODE)], "rejected": [_assistant("    x")]},
    "all scripts": {"prompt": [_user(_WORLD)], "chosen": [_assistant(_WORLD)], "rejected": [_assistant("\u00e9")]},
    "special token of the user": {
        "prompt": [_user("What is [END] for?")],
        "chosen": [_assistant("Mars.")],
        "rejected": [_assistant("Venus.")],
    },
    "assistant alone": {"prompt": [], "chosen": [_assistant("Mars.")], "rejected": [_assistant("Venus.")]},
    "two users": {
        "prompt": [_user("Hello"), *_ASKED],
        "chosen": [_assistant("Mars.")],
        "rejected": [_assistant("Venus.")],
    },
    "empty answer": {"prompt": _ASKED, "chosen": [_assistant("Mars.")], "rejected": [_assistant("")]},
    "sides are conversations": {
        "whole": True,
        "prompt": [_user("Hello"), _assistant("Hello!"), *_ASKED],
        "chosen": [_assistant("Mars.")],
        "rejected": [_assistant("Venus.")],
    },
    "text": {"prompt": "question: the river\nanswer:", "chosen": " the water", "rejected": " 12"},
    "text that ends in a blank": {"prompt": "question: the river\nanswer: ", "chosen": "the water", "rejected": "12"},
    "text joined by a word": {"prompt": "the wat", "chosen": "er is brief", "rejected": "ch"},
    "text joined by blanks": {"prompt": "def f(x):\n", "chosen": "    return", "rejected": "\n  x"},
    "text joined by an accent": {"prompt": "the caf e", "chosen": "\u0301 \u00e9", "rejected": " e"},
    "text with a special token": {"prompt": "the [END] of", "chosen": " water", "rejected": " [END]"},
}
"""By what is awkward in them. ``[END]`` stands for the make's own end of text; of ``whole`` rows each side repeats the
prompt, as the commonest public layout does."""


def row_of(name, end):
    """A row with the end of text of a make."""
    return _with_end(ROWS[name], end)


def _with_end(value, end):
    if isinstance(value, str):
        return value.replace("[END]", end)
    if isinstance(value, list):
        return [_with_end(one, end) for one in value]
    return {key: _with_end(one, end) for key, one in value.items()} if isinstance(value, dict) else value
