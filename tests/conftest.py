"""For every kind of test: a skipped one fails the run; a table of the faults that were tried ends it."""

from __future__ import annotations

import signal

import pytest

from tests.faults.ledger import Ledger

# Reasons that are allowed to skip a test. None so far.
ALLOWED_REASONS: frozenset[str] = frozenset()


class SkipGuard:
    """Notes each skip, and turns the run into a failure at its end."""

    def __init__(self) -> None:
        self.forbidden: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if reason not in ALLOWED_REASONS:
                self.forbidden.append(f"{report.nodeid}: {reason}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.forbidden:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.forbidden:
            terminalreporter.write_line(f"skipped, which is not allowed: {line}", red=True)


LEDGER = pytest.StashKey[Ledger]()


@pytest.fixture(scope="session")
def ledger(request: pytest.FixtureRequest) -> Ledger:
    """Where each try of a fault is noted."""
    return request.config.stash[LEDGER]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = list(terminalreporter.config.stash[LEDGER].lines())
    if lines:
        terminalreporter.section("faults that were tried")
    for line in lines:
        terminalreporter.line(line)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEDGER] = Ledger()
    config.pluginmanager.register(SkipGuard())
    # Heard also where a shell has started the tests in the background: what they start would ignore it, too.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
