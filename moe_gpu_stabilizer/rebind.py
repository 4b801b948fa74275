"""Keep the probes on the libraries that are in use: at each tick, and at once when one is being rewritten."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from .bindings import Attacher, Bindings
from .fanotify import WriteWatch
from .journal import Troubles
from .libraries import Finder, Library
from .processes import printable

logger = logging.getLogger(__name__)


class Rebinder:
    """Finds libraries, attaches to new ones, lets go of dead ones, and says so."""

    def __init__(self, attacher: Attacher, patterns: Sequence[str], troubles: Troubles) -> None:
        self._troubles = troubles
        self.watch = self._watch_writes()
        self._bindings = Bindings(attacher, self.watch)
        self._finder = Finder(patterns)

    @property
    def libraries(self) -> list[Library]:
        """The libraries that are probed now."""
        return self._bindings.libraries

    def look_elsewhere(self, patterns: Sequence[str]) -> None:
        """Use other configured paths and globs from now on."""
        if tuple(patterns) != self._finder.patterns:
            self._finder = Finder(patterns)

    def rebind(self, now_ns: int) -> None:
        """Look which libraries there are, and probe those."""
        for file in self._bindings.changed_unheard():
            self._finder.look_again(file)
        change = self._bindings.update(self._finder.scan(now_ns))
        for library in change.attached:
            logger.info("attached %s (%s)", printable(library.place.path), ", ".join(sorted(library.offsets)))
        for library in change.detached:
            logger.info("detached %s", printable(library.place.path))
        for library, reason in change.failed:
            path = printable(library.place.path)
            self._troubles.begin(f"attach {library.version}", f"cannot attach to {path}: {reason}")
        for path in self._finder.without_functions():
            self._troubles.begin(f"useless {path}", f"nothing to watch in {printable(path)}: it has no llama_decode")

    def on_writes(self) -> bool:
        """Let go of files that are being rewritten. Returns whether one is complete, so that rebind() is due now."""
        assert self.watch is not None
        complete = False
        for write in self.watch.read():
            library = self._bindings.written(write.file)
            if library:
                logger.info("detached %s: it is being rewritten", printable(library.place.path))
            self._finder.look_again(write.file)
            complete = complete or write.closed
        return complete

    def close(self) -> None:
        self._bindings.close()
        if self.watch:
            self.watch.close()

    def _watch_writes(self) -> WriteWatch | None:
        try:
            return WriteWatch()
        except OSError as error:
            # A library that is rewritten in place is then noticed at the next tick instead of at once.
            self._troubles.begin("fanotify", f"cannot hear of writes to libraries: {error.strerror}")
            return None
