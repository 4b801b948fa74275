"""What is said, where, and how often."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from moe_gpu_stabilizer.journal import JournalHandler, Troubles, fields, journal_listens

# Logging is set up for a whole process, so a process of its own does it.
PROGRAM = """
import logging, sys
from moe_gpu_stabilizer.journal import set_up_logging, set_log_level, under_systemd
set_up_logging(sys.argv[1])
logger = logging.getLogger("moe_gpu_stabilizer.daemon")
logger.debug("a detail")
logger.info("floor %s (pid %d inference)", "1020 MHz", 4242)
logger.warning("a trouble")
set_log_level("debug")
logger.debug("a late detail")
print(under_systemd())
"""


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "moe_gpu_stabilizer")
    return caplog


def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    left_out = ("JOURNAL_STREAM", "NOTIFY_SOCKET")
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**{name: value for name, value in os.environ.items() if name not in left_out}, **environment},
        capture_output=True,
        text=True,
        check=True,
    )


# A lasting trouble.


def test_a_trouble_is_said_once(said: pytest.LogCaptureFixture) -> None:
    troubles = Troubles()
    for _ in range(3):
        troubles.begin("node", "no GPU node yet")
    assert said.messages == ["no GPU node yet"]
    assert said.records[0].levelno == logging.WARNING
    assert troubles.lasting == {"node": "no GPU node yet"}


def test_its_end_is_said_once(said: pytest.LogCaptureFixture) -> None:
    troubles = Troubles()
    troubles.begin("node", "no GPU node yet")
    said.clear()
    troubles.end("node", "found the GPU node")
    troubles.end("node", "found the GPU node")
    assert said.messages == ["found the GPU node"]
    assert said.records[0].levelno == logging.INFO
    assert troubles.lasting == {}


def test_the_end_of_what_never_was_is_not_said(said: pytest.LogCaptureFixture) -> None:
    Troubles().end("node", "found the GPU node")
    assert said.messages == []


def test_another_message_about_the_same_cause_is_said(said: pytest.LogCaptureFixture) -> None:
    troubles = Troubles()
    troubles.begin("floor", "cannot write: Permission denied")
    troubles.begin("floor", "cannot write: No such device")
    troubles.end("floor", "it can be raised again")
    assert said.messages == [
        "cannot write: Permission denied",
        "cannot write: No such device",
        "it can be raised again",
    ]


def test_causes_do_not_hide_each_other(said: pytest.LogCaptureFixture) -> None:
    troubles = Troubles()
    troubles.begin("one", "broken")
    troubles.begin("other", "broken")
    troubles.end("one", "whole")
    assert said.messages == ["broken", "broken", "whole"]
    assert troubles.lasting == {"other": "broken"}


def test_a_trouble_that_comes_back_is_said_again(said: pytest.LogCaptureFixture) -> None:
    troubles = Troubles()
    for _ in range(2):
        troubles.begin("node", "gone")
        troubles.end("node", "back")
    assert said.messages == ["gone", "back", "gone", "back"]


def test_a_trouble_has_the_level_it_is_given(said: pytest.LogCaptureFixture) -> None:
    Troubles().begin("settings", "the old settings stay", logging.ERROR)
    assert said.records[0].levelno == logging.ERROR


def test_a_percent_sign_in_a_message_is_a_percent_sign(said: pytest.LogCaptureFixture) -> None:
    Troubles().begin("library", "cannot attach to /opt/100%s/libllama.so")
    assert said.messages == ["cannot attach to /opt/100%s/libllama.so"]


# Where lines go.


def test_without_systemd_lines_go_to_standard_error_as_they_are() -> None:
    done = run(PROGRAM, "info")
    assert done.stderr == "floor 1020 MHz (pid 4242 inference)\na trouble\na late detail\n"
    assert done.stdout == "False\n"


def test_a_level_hides_what_is_below_it() -> None:
    assert run(PROGRAM, "warning").stderr == "a trouble\na late detail\n"
    assert run(PROGRAM, "error").stderr == "a late detail\n"
    assert run(PROGRAM, "debug").stderr.startswith("a detail\n")


def test_the_journal_of_another_stream_is_not_ours() -> None:
    """A daemon that is started by hand from a service's shell inherits the variable and not the stream."""
    done = run(PROGRAM, "info", JOURNAL_STREAM="1:2")
    assert done.stdout == "False\n"
    assert "a trouble" in done.stderr


# What the journal gets. Only a real one can say what it has stored: tests/system asks it.


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What would have gone to the journal."""
    entries: list[tuple[str, ...]] = []
    monkeypatch.setattr("systemd.journal.sendv", lambda *entry: entries.append(entry))
    monkeypatch.setattr("moe_gpu_stabilizer.journal.journal_listens", lambda: True)
    return entries


def journal_logger() -> logging.Logger:
    """One that writes to the journal, whatever standard error is."""
    logger = logging.Logger("test")
    logger.addHandler(JournalHandler())
    return logger


def test_a_journal_entry_has_its_line_priority_and_fields(sent: list[tuple[str, ...]]) -> None:
    journal_logger().info(
        "floor %s", "1020 MHz", extra=fields("raise", FLOOR_HZ=1_020_000_000, TARGET_PID=4242, NODE=None)
    )
    assert sent == [
        (
            "MESSAGE=floor 1020 MHz",
            "PRIORITY=6",
            "SYSLOG_IDENTIFIER=moe-gpu-stabilizer",
            "EVENT=raise",
            "FLOOR_HZ=1020000000",
            "TARGET_PID=4242",
        )
    ]


@pytest.mark.parametrize(
    ("level", "priority"), [(logging.DEBUG, 7), (logging.INFO, 6), (logging.WARNING, 4), (logging.ERROR, 3)]
)
def test_levels_become_the_priorities_of_syslog(sent: list[tuple[str, ...]], level: int, priority: int) -> None:
    journal_logger().log(level, "a line")
    assert sent[0][1] == f"PRIORITY={priority}"


def test_a_journal_that_does_not_answer_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_entry: str) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr("systemd.journal.sendv", refuse)
    monkeypatch.setattr("moe_gpu_stabilizer.journal.journal_listens", lambda: True)
    journal_logger().error("nobody hears this")


def test_a_journal_that_does_not_read_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = str(tmp_path / "socket")
    monkeypatch.setattr("moe_gpu_stabilizer.journal.JOURNAL_SOCKET", address)
    assert not journal_listens(), "there is none"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as other,
    ):
        journal.bind(address)
        assert journal_listens()
        with contextlib.suppress(BlockingIOError):
            while True:
                other.sendto(b"MESSAGE=one of many", address)
        assert not journal_listens()
        journal.recv(100)
        assert journal_listens(), "it reads again"


def test_lines_that_the_journal_did_not_take_are_counted(
    sent: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = journal_logger()
    monkeypatch.setattr("moe_gpu_stabilizer.journal.journal_listens", lambda: False)
    logger.info("one")
    logger.info("two")
    assert sent == []
    monkeypatch.setattr("moe_gpu_stabilizer.journal.journal_listens", lambda: True)
    logger.info("three")
    assert [entry[0] for entry in sent] == ["MESSAGE=(2 lines were lost: nobody read them)", "MESSAGE=three"]


def test_a_trouble_about_a_library_names_it(sent: list[tuple[str, ...]]) -> None:
    package = logging.getLogger("moe_gpu_stabilizer")
    handler = JournalHandler()
    package.addHandler(handler)
    try:
        Troubles().replace("attach", {"/opt/libllama.so": "cannot attach to /opt/libllama.so"})
    finally:
        package.removeHandler(handler)
    assert set(sent[0]) >= {"EVENT=trouble", "LIBRARY=/opt/libllama.so", "PRIORITY=4"}


def test_the_last_trouble_is_remembered_when_it_is_over(said: pytest.LogCaptureFixture) -> None:
    troubles = Troubles()
    troubles.begin("node", "no GPU node yet")
    troubles.begin("floor", "nothing to raise", logging.INFO)
    troubles.end("node", "found it")
    assert troubles.last is not None
    assert troubles.last.message == "no GPU node yet"
    assert said.messages[-1] == "found it"


def test_the_one_line_of_a_failure_is_an_error_in_the_journal(tmp_path: Path) -> None:
    """systemd takes standard error for information, but for what begins with a priority (sd-daemon(3))."""
    program = "from moe_gpu_stabilizer.journal import complain; complain('no such file')"
    assert run(program).stderr == "no such file\n"
    with (tmp_path / "stream").open("w+") as stream:
        status = os.fstat(stream.fileno())
        environment = {**os.environ, "JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        subprocess.run([sys.executable, "-c", program], stderr=stream, env=environment, check=True)
        stream.seek(0)
        assert stream.read() == "<3>no such file\n"
