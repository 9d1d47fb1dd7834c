"""The run file of the smallest real runs: a GPT-2 of four layers without dropout, on the manual of Python."""

_TEXT = """
[model]
from_scratch = true

[model.architecture]
model_type = "gpt2"
vocab_size = 300
n_positions = 16
n_embd = 32
n_layer = 4
n_head = 4
resid_pdrop = 0.0
embd_pdrop = 0.0
attn_pdrop = 0.0
bos_token_id = 0
eos_token_id = 0

[data]
sources = [{{ kind = "python_manual" }}]
tokenizer = {{ kind = "bpe", vocab_size = 300 }}
sequence_length = 16
validation_share = 0.2
max_documents = 12
max_validation_sequences = {held_out}

[train]
steps = {steps}
batch_size = 8
microbatches = 4
seed = 3
validate_every = {validate_every}

[optimizer]
lr = 1e-2

"""


def tiny_run_file(sections: str = "", *, steps: int = 6, validate_every: int = 3, held_out: int = 8) -> str:
    """Its text, and the sections that a test adds."""
    return _TEXT.format(steps=steps, validate_every=validate_every, held_out=held_out) + sections
