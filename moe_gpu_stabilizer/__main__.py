"""The command line: one error handler, exit codes 0 (well), 1 (a failure), 2 (usage or configuration)."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .errors import StabilizerError
from .invocation import program
from .journal import complain
from .processes import printable

logger = logging.getLogger(__name__)

STANDARD_OUTPUT, STANDARD_ERROR = 1, 2

DESCRIPTION = """\
Raises the GPU's lowest clock (devfreq min_freq) while llama.cpp runs a Mixture-of-Experts model whose experts are on
the CPU, and gives it back one second after. Without an option it runs in the foreground, as the service does, until
SIGTERM or SIGINT; SIGHUP makes it read its settings again."""

USAGE = """\
moe-gpu-stabilizer [--config FILE]
       moe-gpu-stabilizer --check [--json] [--config FILE]
       moe-gpu-stabilizer --status [--json]
       moe-gpu-stabilizer --reload
       moe-gpu-stabilizer --restore
       moe-gpu-stabilizer --demo [-- COMMAND...]
       moe-gpu-stabilizer --version"""

EPILOG = """\
files:
  /etc/default/moe-gpu-stabilizer   the settings; every key is optional
  /run/moe-gpu-stabilizer/          the running daemon's status, and the clock that is to be given back

exit status: 0 all is well, 1 something failed or is missing, 2 wrong usage or configuration

The manual, moe-gpu-stabilizer(8), has the log lines, signals, overhead and limits."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moe-gpu-stabilizer",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="read the settings from FILE")
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--check", action="store_true", help="show what was found, what counts, what is missing; no root needed"
    )
    action.add_argument("--status", action="store_true", help="show what the running daemon is doing; no root needed")
    action.add_argument("--reload", action="store_true", help="make the running daemon read its settings again")
    action.add_argument("--restore", action="store_true", help="give back a floor that a killed daemon left, and exit")
    action.add_argument("--demo", action="store_true", help="show the whole path on a simulated GPU, with real uprobes")
    action.add_argument("--version", action="version", version=f"moe-gpu-stabilizer {__version__}")
    parser.add_argument("--json", action="store_true", help="with --check and --status: print JSON")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="with --demo: your llama.cpp command, after --")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its exit status."""
    open_standard_descriptors()
    try:
        status = run(parse(arguments))
        sys.stdout.flush()
        return status
    except StabilizerError as error:
        complain(f"moe-gpu-stabilizer: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        # Writing what there is to say has failed; the interpreter would try once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader has left: `--check | head`
            return 0
        complain(f"moe-gpu-stabilizer: {error.strerror or error}")
        return 1
    except ModuleNotFoundError as error:
        complain(f"moe-gpu-stabilizer: the Python package {error.name} is missing here; run the installation again")
        return 1
    except MemoryError:
        complain("moe-gpu-stabilizer: out of memory")
        return 1
    except Exception as error:  # a fault of ours: one line says where, and systemd starts the daemon anew
        import traceback

        logger.debug("%s", traceback.format_exc())
        at = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(at.filename)}:{at.lineno}"
        complain(f"moe-gpu-stabilizer: internal error at {place}, please report it: {printable(repr(error))}")
        return 1


def open_standard_descriptors() -> None:
    """Put /dev/null where standard input, output or error is closed: the next file opened would take its place."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STANDARD_ERROR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(STANDARD_OUTPUT, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(STANDARD_ERROR, "w", closefd=False)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; ends the program where it is wrong, or asks for help."""
    parser = make_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown and options.demo:
        parser.error(f"{unknown[0]} is no option of ours; before your own command put -- : --demo -- COMMAND...")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.json and not (options.check or options.status):
        parser.error("--json goes with --check or --status")
    if options.config is not None and (options.status or options.reload or options.restore or options.demo):
        parser.error("--config goes with --check, or with no other option")
    if options.config == Path():
        parser.error("--config needs the name of a file")
    if options.command and not options.demo:
        parser.error(f"what is {options.command[0]!r}? A command goes with --demo, after --")
    return options


def run(options: argparse.Namespace) -> int:
    """Do what the options say. Each mode imports what it needs: the daemon should stay small."""
    if options.check:
        from . import check

        return check.main(options.config, as_json=options.json)
    if options.status or options.reload or options.restore:
        from . import client

        if options.status:
            return client.show_status(as_json=options.json)
        return client.reload() if options.reload else client.restore()
    if options.demo:
        from . import demo

        return demo.main(options.command)
    return run_daemon(options.config)


def run_daemon(config: Path | None) -> int:
    import resource

    from .config import load_in_child
    from .daemon import Daemon
    from .journal import set_up_logging
    from .runtime import Runtime

    os.umask(0o022)  # --status needs no root
    # A descriptor for each probe and each process that calls: the usual 1,024 may be too few.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    settings = load_in_child(config)
    set_up_logging(settings.log_level)
    runtime = Runtime()
    runtime.create()
    if not runtime.lock():
        raise StabilizerError("another moe-gpu-stabilizer is running", f"see {shlex.join([*program(), '--status'])}")
    Daemon(settings, runtime, lambda: load_in_child(config)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
