"""Keep the probes on the libraries that are in use: at each tick, and at once when one is being rewritten."""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from . import elf
from .bindings import Attacher, Bindings
from .choice import MOST_PROBED_FILES, choose, say_left_out
from .fanotify import WriteWatch
from .files import FileId
from .isolated import ChildError
from .journal import Troubles, fields
from .libraries import Finder, Library, say_refused
from .processes import printable
from .settings import NANOSECONDS, Settings

logger = logging.getLogger(__name__)

# What could not be probed was perhaps being written, or the kernel had not let go of what it was: a tick may be far.
RETRY_NS = 1_000_000_000

# The daemon is ready when it has looked for libraries for so long, or knows those that are there.
LONGEST_WAIT_NS = 5 * NANOSECONDS


class Rebinder:
    """Finds libraries, attaches to new ones, lets go of dead ones, and says so.

    What it waits for, writes to probed files and the reading of new ones, it registers in the daemon's selector, with
    the function to call as the key's data.
    """

    def __init__(
        self,
        attacher: Attacher,
        settings: Settings,
        troubles: Troubles,
        selector: selectors.BaseSelector,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called after libraries were attached or let go of outside of rebind()."""
        self._troubles = troubles
        self._selector = selector
        self._changed = changed
        self._watch = self._watch_writes()
        self._finder = Finder()
        self._bindings = Bindings(attacher, self._watch, self._finder.mounts, MOST_PROBED_FILES)
        self._retry_ns: int | None = None
        self._heard_ns = 0  # when the end of a write was last looked into
        self._said_left_out = 0
        self._gone_ns: dict[FileId, int] = {}  # since when probed files are not found any more
        self._failed: dict[FileId, tuple[str, str]] = {}  # the path, and what is said of it
        self.use(settings)

    @property
    def libraries(self) -> list[Library]:
        """The libraries that are probed now."""
        return self._bindings.libraries

    @property
    def deadline_ns(self) -> int | None:
        """When on_deadline() is due (CLOCK_MONOTONIC); None while nothing is waited for."""
        reader = self._finder.reader
        if reader.reading:
            return reader.reading.deadline_ns
        return min(filter(None, (self._retry_ns, reader.rests_until_ns)), default=None)

    def use(self, settings: Settings) -> None:
        """Look in these configured places, and probe what these settings need, from now on."""
        self._finder.patterns = settings.libraries
        self._functions = elf.CALLS if settings.detect == "flags" else elf.PROBED_FUNCTIONS

    def rebind(self) -> None:
        """Look which libraries there are, and probe those. New files are read meanwhile, and probed when they are."""
        for file in (*self._bindings.changed_unheard(), *self._failed):
            self._finder.look_again(file)
        self._update()

    def _update(self) -> None:
        """Probe what has been read so far."""
        reader = self._finder.reader
        before = reader.reading
        try:
            found = self._finder.look(time.monotonic_ns())
        except (OSError, ChildError) as error:  # out of descriptors, memory or processes: the next tick tries again
            self._troubles.begin("look", f"cannot look for libraries: {error}")
            reader.rests_until_ns = None  # or that would be due for ever
            return
        self._troubles.end("look", "libraries can be looked for again")
        if reader.reading and reader.reading is not before:
            self._selector.register(reader.reading.child, selectors.EVENT_READ, self._on_reading)
        wanted = {file: library.only(self._functions) for file, library in found.items()}
        wanted = {file: library for file, library in wanted.items() if library.offsets}
        chosen = choose(wanted, self._bindings.files)
        change = self._bindings.update(chosen, self._not_replaced_yet(wanted))
        for library in change.attached:
            path, functions = printable(library.place.path), ", ".join(sorted(library.offsets))
            logger.info("attached %s (%s)", path, functions, extra=fields("attach", LIBRARY=path))
        for library in change.detached:
            say_detached(library)
        self._note_failures(found, change.failed)
        if change.waiting:
            self._retry_ns = time.monotonic_ns() + RETRY_NS
        refused = {printable(path): printable(kind) for path, kind in self._finder.refused().items()}
        self._troubles.replace("place", {path: say_refused(path, kind) for path, kind in refused.items()})
        if reader.is_done:  # until all is read, a library may only seem to have nothing to watch
            useless = {printable(path): why for path, why in self._finder.without_functions().items()}
            messages = {path: f"nothing to watch in {path}: {why}" for path, why in useless.items()}
            self._troubles.replace("useless", messages)
            self._say_left_out(len(wanted) - len(chosen))

    def _not_replaced_yet(self, wanted: Collection[FileId]) -> set[FileId]:
        """The probed files that have gone a moment ago: what replaces them may still have to be read."""
        now_ns = time.monotonic_ns()
        self._gone_ns = {file: self._gone_ns.get(file, now_ns) for file in self._bindings.files - set(wanted)}
        if self._finder.reader.is_done:
            return set()
        return {file for file, since_ns in self._gone_ns.items() if now_ns < since_ns + RETRY_NS}

    def _say_left_out(self, count: int) -> None:
        """Once, and again where it is ten times as many: somebody may start and end such programs all the time."""
        if count == 0:
            self._said_left_out = 0
            self._troubles.end("crowd", "all libraries are watched again")
        elif count >= 10 * self._said_left_out:
            self._said_left_out = count
            self._troubles.begin("crowd", say_left_out(count))

    def _note_failures(self, found: Mapping[FileId, Library], failed: Sequence[tuple[Library, str]]) -> None:
        """What could not be probed is looked at anew once soon, then at each tick, and stays a trouble until then."""
        before = self._failed
        still_unread = {} if self._finder.reader.is_done else before
        self._failed = {file: told for file, told in still_unread.items() if file not in found}
        for library, why in failed:
            path = printable(library.place.path)
            self._failed[library.version.file] = path, f"cannot attach to {path}: {why}"
        self._troubles.replace("attach", dict(self._failed.values()))
        files = [library.version.file for library, _ in failed]
        if any(file not in before or self._bindings.is_leaving(file) for file in files):
            self._retry_ns = time.monotonic_ns() + RETRY_NS

    def rebind_and_wait(self) -> None:
        """rebind(), and wait for the files that look like llama.cpp, which are read first."""
        self.rebind()
        until_ns = time.monotonic_ns() + LONGEST_WAIT_NS
        reader = self._finder.reader
        while reader.reading and reader.reads_likely and time.monotonic_ns() < until_ns:
            reader.reading.child.receive_until(min(until_ns, reader.reading.deadline_ns))
            if not reader.reading.child.is_complete:
                return
            self.on_deadline()

    def on_deadline(self) -> None:
        """New files have been read, or their reader has had its time; or the kernel may have let go of something."""
        if self._finder.reader.reading:
            self._selector.unregister(self._finder.reader.reading.child)
            self._finder.reader.finish()
            self._update()
        else:
            self._retry_ns = None
            self.rebind()
        self._changed()

    def seen_calling(self, pid: int) -> None:
        """A process calls into a library: that stays probed while it runs, whatever becomes of the path."""
        self._finder.visit_soon(pid)

    def release_wanted(self) -> None:
        """SIGIO: somebody opens a probed file for writing, and waits until we have let go of it."""
        for file in self._bindings.wanted_for_writing():
            self._release(file)
        self._changed()

    def _release(self, file: FileId) -> None:
        library = self._bindings.written(file)
        if library:
            say_detached(library, "it is being rewritten")
        self._finder.look_again(file)

    def close(self) -> None:
        """Let go of everything."""
        self._bindings.close()
        self._finder.close()
        if self._watch:
            self._watch.close()

    def _on_reading(self) -> None:
        reading = self._finder.reader.reading
        if reading and reading.child.receive():
            self.on_deadline()

    def _watch_writes(self) -> WriteWatch | None:
        try:
            watch = WriteWatch()
        except OSError as error:
            # A library that is rewritten in place is then noticed at the next tick instead of at once.
            self._troubles.begin("fanotify", f"cannot hear of writes to libraries: {error.strerror}")
            return None
        self._selector.register(watch, selectors.EVENT_READ, self._on_writes)
        return watch

    def _on_writes(self) -> None:
        """Let go of files that are being rewritten, and look at them again as soon as one is complete."""
        assert self._watch is not None
        writes = self._watch.read()
        for write in writes:
            if write.modified:
                self._release(write.file)
                self._changed()
            if write.closed:  # a tick may have read half of it meanwhile
                self._finder.look_again(write.file)
        if any(write.closed for write in writes):
            now_ns = time.monotonic_ns()
            if now_ns >= self._heard_ns + RETRY_NS:
                self._heard_ns = now_ns
                self.rebind()
                self._changed()
            else:  # whose file it is may write to it all the time
                self._retry_ns = self._retry_ns or self._heard_ns + RETRY_NS


def say_detached(library: Library, reason: str | None = None) -> None:
    path = printable(library.place.path)
    line = f"detached {path}: {reason}" if reason else f"detached {path}"
    logger.info("%s", line, extra=fields("detach", LIBRARY=path, REASON=reason))
