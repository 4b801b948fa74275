"""Errors that end in one clear line for the user: what is wrong, and what to do."""

from __future__ import annotations


class StabilizerError(Exception):
    """A failure that the program explains itself. Exit code 1."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class ConfigError(StabilizerError):
    """The settings or the command line cannot be used. Exit code 2."""

    exit_code = 2


class ProbeError(StabilizerError):
    """The kernel or libbcc_bpf refused to load, attach or read the BPF program."""


class DevfreqError(StabilizerError):
    """A GPU node cannot be found, read or written."""
