"""What /proc says of a process, and how its end is heard."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .policy import Process

PROC = Path("/proc")

# The real user id in /proc/PID/status (proc(5)). The name above it cannot hold a newline: the kernel escapes it there.
USER_ID = re.compile(rb"^Uid:\t([0-9]+)\t", re.MULTILINE)

# A thread is at work when it used at least this part of the time between two looks. An idle llama-server's thread uses
# 0.1 %; one that waits for the GPU inside a call still computes experts in between.
AT_WORK_SHARE = 0.03

# Positions in /proc/PID/stat, counted behind the ")" that ends the name (proc(5): fields 3, 9, 12, 14, 15, 22).
STATE_FIELD = 0
FLAGS_FIELD = 6
MAJOR_FAULTS_FIELD = 9
START_TIME_FIELD = 19
CPU_FIELDS = slice(11, 13)
EXITING = 0x4  # PF_EXITING, of include/linux/sched.h: it has been the same since Linux 2.6
DEAD_STATES = (b"Z", b"X")
CLOCK_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


class ProcessVanishedError(Exception):
    """It ended while it was looked at, or /proc does not show it."""


def read_proc(path: Path, most_bytes: int = 65536) -> bytes:
    """Read a file of /proc to its end, at most `most_bytes`. Raises ProcessVanishedError and PermissionError."""
    try:
        with open(path, "rb", buffering=0) as file:
            chunks = []
            while most_bytes > 0:
                # One read() of these files gives at most a page or the whole, depending on the file.
                chunk = file.read(most_bytes)
                if not chunk:
                    break
                chunks.append(chunk)
                most_bytes -= len(chunk)
            return b"".join(chunks)
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessVanishedError from None


def _stat_fields(directory: Path) -> list[bytes]:
    """The fields of a stat file behind the name, which may itself contain blanks and parentheses."""
    fields = read_proc(directory / "stat").rpartition(b")")[2].split()
    if not fields:
        raise ProcessVanishedError
    return fields


def every_pid_and_inode(proc: Path = PROC) -> dict[int, int]:
    """Return every pid with the inode of its directory in /proc: a pid that is used again has another one.

    psutil.pids() gives no inodes, and here they come with the listing, without another system call.
    """
    with os.scandir(proc) as entries:
        return {int(entry.name): entry.inode() for entry in entries if entry.name.isdigit()}


def identify(pid: int, proc: Path = PROC) -> Process:
    """Return the process that has this pid now. Raises ProcessVanishedError."""
    return Process(pid, int(_stat_fields(proc / str(pid))[START_TIME_FIELD]))


def pidfd_of(pid: int) -> int:
    """Open what becomes readable when the process ends (pidfd_open(2)). Raises ProcessVanishedError, OSError."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise ProcessVanishedError from None


def is_running(process: Process, proc: Path = PROC) -> bool:
    """Is this very process still at work? Where /proc hides other users' processes, one with its id must do.

    One that was killed may be there for a while, and not at work: the kernel takes its probes out.
    """
    try:
        fields = _stat_fields(proc / str(process.tgid))
        is_ending = fields[STATE_FIELD] in DEAD_STATES or int(fields[FLAGS_FIELD]) & EXITING
        return int(fields[START_TIME_FIELD]) == process.start_ticks and not is_ending
    except ProcessVanishedError:
        pass
    try:
        os.kill(process.tgid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return False  # it can be signalled, so /proc would show it: another has come and gone


def is_dead(directory: Path) -> bool:
    """Has the process or thread behind /proc/PID or /proc/PID/task/TID ended, asked for or not?"""
    try:
        return _stat_fields(directory)[STATE_FIELD] in DEAD_STATES
    except ProcessVanishedError:
        return True


def user_id_of(pid: int, proc: Path = PROC) -> int:
    """Return the real user id. Raises ProcessVanishedError.

    Not with psutil, which takes 2 MB, and which in some versions cannot be imported where /proc shows processes alone
    (ProcSubset=pid, systemd.exec(5)).
    """
    found = USER_ID.search(read_proc(proc / str(pid) / "status"))
    if not found:  # an entry that has become empty meanwhile
        raise ProcessVanishedError
    return int(found[1])


def name_of(pid: int, proc: Path = PROC) -> str:
    """Return the process's name with what a terminal or log would trip over made visible; "?" where it is gone."""
    try:
        return printable(read_proc(proc / str(pid) / "comm").decode("utf-8", "replace").rstrip("\n"))
    except ProcessVanishedError:
        return "?"


def printable(text: str) -> str:
    """Escape control characters: any user can put newlines and terminal escapes into names, paths and arguments."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


class ThreadMeter:
    """Tells whether one thread is at work, by comparing its CPU time and page faults between two looks."""

    def __init__(self, tgid: int, proc: Path = PROC) -> None:
        self._tgid = tgid
        self._proc = proc
        self._tid = 0
        self._cpu_ns = 0
        self._major_faults = 0
        self._looked_ns = 0

    def at_work(self, tid: int, since_ns: int, now_ns: int) -> bool:
        """Is thread `tid` at work at `now_ns`? Work before `since_ns`, its last call, is no sign of work after it.

        The first look after a call only notes the numbers, unless the thread waits in state D: a model that is larger
        than memory is read while it computes. A thread that stays in D without a page fault waits for something else.
        """
        directory = self._proc / str(self._tgid) / "task" / str(tid)
        try:
            fields = _stat_fields(directory)
            waits, major_faults = fields[STATE_FIELD] == b"D", int(fields[MAJOR_FAULTS_FIELD])
            cpu_ns = self._cpu_time_ns(directory)
        except (ProcessVanishedError, IndexError, ValueError):
            return False
        except OSError:  # out of descriptors or memory: what cannot be seen keeps no clock up
            return False
        comparable = tid == self._tid and self._looked_ns >= since_ns
        used_ns, passed_ns = cpu_ns - self._cpu_ns, now_ns - self._looked_ns
        faulted = major_faults != self._major_faults
        self._tid, self._cpu_ns, self._major_faults, self._looked_ns = tid, cpu_ns, major_faults, now_ns
        if not comparable:
            return waits
        return used_ns >= AT_WORK_SHARE * passed_ns or (waits and (faulted or used_ns > 0))

    @staticmethod
    def _cpu_time_ns(directory: Path) -> int:
        try:
            # Nanoseconds on the CPU, where the kernel keeps schedstat; else clock ticks of 10 ms.
            return int(read_proc(directory / "schedstat").split()[0])
        except (ProcessVanishedError, IndexError):
            return sum(int(ticks) for ticks in _stat_fields(directory)[CPU_FIELDS]) * CLOCK_TICK_NS
