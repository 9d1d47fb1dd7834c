"""Side channels that can be measured in Python: sizes and times of messages, time of mask arithmetic, rollback.

``python -m phalanx.lab.bench.alone.side_channels OUT.json [--texts 400] [--calls 4000]``

The attacker of `sizes` sees the lengths and the times of sealed frames, or of a client's secure sum, and has as many
labelled ones to learn from: it names the nearest. Texts of the two labels differ in their typical length, as they do in
practice. With `padded` a row has the run's sequence length, without it its own. `timing` compares two classes of secret
values by Welch's t over interleaved calls: beyond 4.5 they are told apart (Reparaz, Balasch, Verbauwhede 2017).
`rollback` puts sealed states back, alone and together with the file of their counter.
"""

import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from phalanx.errors import RollbackError
from phalanx.lab.bench.alone.seal import shake_hands
from phalanx.lab.bench.measure.harness import run_program
from phalanx.security.aggregate.masks import Mask, add_masks
from phalanx.security.crypto import NotRollbackProofCounter
from phalanx.security.mask.ring import add_mod_p
from phalanx.security.seal import BlobPlace, BlobSealer, Purpose, TensorKind

SEQUENCE, WIDTH, VALUES = 64, 128, 16_384
TYPICAL_LENGTHS = (20, 36)
STATES = 50
Row = dict[str, object]
Observation = tuple[float, float, int, int]
"""Size, seconds, label, length of the text."""


def draw_texts(texts: int) -> list[tuple[int, int]]:
    """Draw label and length of each text, the same ones for every arm."""
    rng = np.random.default_rng(6)
    labels = [int(label) for label in rng.integers(2, size=texts)]
    return [(label, int(np.clip(rng.normal(TYPICAL_LENGTHS[label], 8), 4, SEQUENCE))) for label in labels]


def observe_split(texts: int, *, padded: bool) -> list[Observation]:
    """Seal the activations of texts, one frame each."""
    rng = np.random.default_rng(7)
    sender = shake_hands(2**20)[0].sender
    seen = []
    for step, (label, length) in enumerate(draw_texts(texts)):
        rows = SEQUENCE if padded else length
        kind = TensorKind(Purpose.ACTIVATION, "cut", "float32", (rows, WIDTH))
        plain = rng.standard_normal((rows, WIDTH), np.float32).tobytes()
        started = time.perf_counter()
        frame = sender.seal_tensor(kind, step, 0, plain)
        seen.append((float(len(frame)), time.perf_counter() - started, label, length))
    return seen


def observe_sums(texts: int, *, padded: bool) -> list[Observation]:
    """Mask updates of two kinds of clients, or send them deflated instead, which shows how many values have changed."""
    rng = np.random.default_rng(8)
    seen = []
    for label, length in draw_texts(texts):
        changed = length * (VALUES // SEQUENCE)
        update = np.zeros(VALUES, "<u4")
        update[:changed] = rng.integers(1, 2**20, changed)
        started = time.perf_counter()
        if padded:
            add_masks(update, [Mask(rng.bytes(32), True) for _ in range(4)])
            size = update.nbytes
        else:
            size = len(zlib.compress(update.tobytes(), 1))
        seen.append((float(size), time.perf_counter() - started, label, changed))
    return seen


def infer_facts(name: str, seen: Sequence[Observation], *, padded: bool) -> Row:
    """Attack one half of the observations with the other half's labels."""
    half = len(seen) // 2
    learned, asked = seen[:half], seen[half:]
    row: Row = {
        "channel": name,
        "padded": padded,
        "messages": len(asked),
        "sizes": len({message[0] for message in seen}),
    }
    for signal, place in (("size", 0), ("time", 1)):
        guesses = [_nearest_facts(learned, message[place], place) for message in asked]
        row[f"label_accuracy_{signal}"] = statistics.mean(
            g[0] == message[2] for g, message in zip(guesses, asked, strict=True)
        )
        errors = [abs(g[1] - message[3]) / message[3] for g, message in zip(guesses, asked, strict=True)]
        row[f"length_error_{signal}"] = statistics.median(errors)
    labels = [message[2] for message in asked]
    row["label_accuracy_without"] = max(labels.count(0), labels.count(1)) / len(labels)
    typical = statistics.median(message[3] for message in learned)
    row["length_error_without"] = statistics.median(abs(typical - message[3]) / message[3] for message in asked)
    return row


def _nearest_facts(learned: Sequence[Observation], signal: float, place: int) -> tuple[int, float]:
    """Return the commonest label and the median length among the 15 nearest; equal signals all count."""
    distances = sorted(abs(message[place] - signal) for message in learned)
    near = [message for message in learned if abs(message[place] - signal) <= distances[min(14, len(distances) - 1)]]
    return int(sum(message[2] for message in near) * 2 > len(near)), statistics.median(message[3] for message in near)


def time_arithmetic(calls: int) -> list[Row]:
    """Time pad and mask arithmetic on values of two classes, and of one class in two arrays as a control."""
    zeros, large = (np.full(VALUES, value, np.uint32) for value in (0, 2**31 - 2))
    return [
        row
        for name, second in (("zeros and large", large), ("control: zeros and zeros", zeros.copy()))
        for row in _time_classes(name, (zeros, second), calls)
    ]


def _time_classes(classes: str, arrays: tuple[np.ndarray, np.ndarray], calls: int) -> list[Row]:
    rng = np.random.default_rng(9)
    pad = rng.integers(0, 2**31 - 1, VALUES).astype(np.uint32)
    # both classes are copied to one place first: where an array lies changes its time as well
    place, mask = np.empty(VALUES, np.uint32), Mask(bytes(range(32)), True)
    actions: dict[str, Callable[[], object]] = {
        "pad added mod p": lambda: add_mod_p(place, pad),
        "mask added mod 2^32": lambda: add_masks(place, [mask]),
    }
    rows: list[Row] = []
    for action, call in actions.items():
        times: tuple[list[float], list[float]] = ([], [])
        for number in rng.integers(2, size=calls):
            place[:] = arrays[number]
            started = time.perf_counter()
            call()
            times[number].append(time.perf_counter() - started)
        cut = float(np.quantile([*times[0], *times[1]], 0.9))
        common = [[seconds for seconds in kind if seconds <= cut] for kind in times]
        medians = {f"median_us_{number}": statistics.median(kind) * 1e6 for number, kind in enumerate(times, 1)}
        rows.append({"operation": action, "classes": classes, "calls": calls, "welch_t": welch_t(*common)} | medians)
    return rows


def welch_t(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Welch's statistic of two samples."""
    spread = statistics.variance(first) / len(first) + statistics.variance(second) / len(second)
    return float((statistics.mean(first) - statistics.mean(second)) / spread**0.5)


def put_states_back() -> list[Row]:
    """Seal states, put an older one back, and count refusals."""
    rows: list[Row] = []
    for arm in ("state alone", "state and counter's file"):
        refused = 0
        for _ in range(STATES):
            with tempfile.TemporaryDirectory(prefix="phalanx-rollback-") as home:
                refused += _is_refused(Path(home), with_counter=arm != "state alone")
        rows.append({"put_back": arm, "states": STATES, "refused": refused})
    return rows


def _is_refused(home: Path, *, with_counter: bool) -> bool:
    counter, place = home / "counter", BlobPlace("bench", "state", 0)
    sealer = BlobSealer(b"\5" * 32, NotRollbackProofCounter(counter))
    old = bytes(sealer.seal_blob(place, b"older"))
    shutil.copy(counter, home / "copy")
    sealer.seal_blob(place, b"newer")
    if with_counter:
        shutil.copy(home / "copy", counter)
    try:
        BlobSealer(b"\5" * 32, NotRollbackProofCounter(counter)).open_blob(place, old)
    except RollbackError:
        return True
    return False


def measure_channels(texts: int = 400, calls: int = 4000) -> dict[str, object]:
    """Measure all three."""
    sizes = [
        infer_facts(name, observe(texts, padded=padded), padded=padded)
        for name, observe in (("sealed split", observe_split), ("secure sum", observe_sums))
        for padded in (False, True)
    ]
    return {"sizes": sizes, "timing": time_arithmetic(calls), "rollback": put_states_back()}


def main() -> None:
    """Run the bench."""
    run_program("side channels", measure_channels)


if __name__ == "__main__":
    main()
