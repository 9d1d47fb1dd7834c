"""Personal weights of a site: trained like the others, kept in its own directory, and sent to no other party."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from phalanx.errors import CheckpointError, ConfigError
from phalanx.federated.algorithms import Named
from phalanx.federated.vectors import shapes_of

_KEPT = 64
_SHOWN = 4


def personal_names(trained: Iterable[str], patterns: Sequence[str]) -> frozenset[str]:
    """Return the names that stay at a site.

    Args:
        trained: Names of all weights that are trained.
        patterns: As a shell has them.

    Raises:
        ConfigError: A pattern matches none of them, or nothing is left that sites would share.
    """
    names = sorted(trained)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join([*names[:_SHOWN], *(["..."] if len(names) > _SHOWN else [])])
            raise ConfigError(f'federated.personal: "{pattern}" matches no trained weight; there are {shown}')
    found = frozenset(name for name in names if any(fnmatchcase(name, one) for one in patterns))
    if len(found) == len(names):
        raise ConfigError("federated.personal: matches all trained weights, and sites would share none; name fewer")
    return found


class PersonalWeights:
    """The personal weights of one site, a file for each of the latest rounds that it has trained.

    Args:
        directory: Of the site alone.
        first: What they are before its first round.

    Guarantees:
        A round that is trained again begins with what it began with: of the rounds before it, the latest.
    """

    def __init__(self, directory: Path, first: Mapping[str, object]) -> None:
        self._directory, self._names = directory, frozenset(first)
        directory.mkdir(parents=True, exist_ok=True)

    def before(self, number: int) -> Named | None:
        """Return them as they were before a round; None where the site has trained no earlier one.

        Raises:
            CheckpointError: The file is damaged, or of other weights.
        """
        earlier = [one for one in self._rounds() if one < number]
        return self._read(earlier[-1]) if earlier else None

    def latest(self) -> Named | None:
        """Return them as they are now; None before the first round.

        Raises:
            CheckpointError: The file is damaged, or of other weights.
        """
        rounds = self._rounds()
        return self._read(rounds[-1]) if rounds else None

    def keep(self, number: int, weights: Named) -> None:
        """Keep them as a round has left them; later rounds that are done again go."""
        path = self._path(number)
        beside = path.with_suffix(".tmp")
        save_file(weights, beside)
        beside.replace(path)
        rounds = self._rounds()
        for one in [*[old for old in rounds if old > number], *rounds[:-_KEPT]]:
            self._path(one).unlink(missing_ok=True)

    def _rounds(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("round-")) for path in self._directory.glob("round-*.safetensors"))

    def _path(self, number: int) -> Path:
        return self._directory / f"round-{number}.safetensors"

    def _read(self, number: int) -> Named:
        try:
            found: Named = load_file(self._path(number))
        except (SafetensorError, OSError) as exc:
            raise CheckpointError(
                f"{self._path(number)}: cannot be read; remove it, and the round before holds"
            ) from exc
        if frozenset(shapes_of(found)) != self._names:
            raise CheckpointError(f"{self._path(number)}: is of other weights than federated.personal names")
        return found
