"""Local workers that are started in the place of others, and again where one ends before it has joined."""

from collections.abc import Callable, Sequence

from phalanx.pipeline import Observe


class Replacements:
    """The names of replacements: free ones, and those on the way.

    Args:
        names: In the order of their use.
        start: Starts the worker of a name.
        has_joined: Whether it takes part, or has.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        start: Callable[[str], None],
        is_alive: Callable[[str], bool],
        has_joined: Callable[[str], bool],
        observe: Observe,
    ) -> None:
        self._names = iter(names)
        self._start = start
        self._is_alive = is_alive
        self._has_joined = has_joined
        self._observe = observe
        self._expected: list[str] = []

    def start_replacement(self, gone: str) -> None:
        """Start another worker, as long as there are names."""
        name = next(self._names, None)
        if name is not None:
            self._start(name)
            self._expected.append(name)
            self._observe("respawned", {"party": name, "in_place_of": gone})

    def replace_stillborn(self) -> None:
        """Start another worker for each that has ended without joining: no other part of the owner misses it."""
        self._expected = [name for name in self._expected if not self._has_joined(name)]
        stillborn = [name for name in self._expected if not self._is_alive(name)]
        self._expected = [name for name in self._expected if name not in stillborn]
        for name in stillborn:
            self.start_replacement(name)
