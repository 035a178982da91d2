"""The command's entry: subcommands, and errors as one line each."""

from __future__ import annotations

import errno
import gc
import os
import sys
from importlib.metadata import entry_points
from typing import Annotated

import typer

from gateway.announcing import give_up_output
from gateway.cli import exit_codes
from gateway.cli.audit import audit
from gateway.cli.cache import cache
from gateway.cli.chat import chat
from gateway.cli.check import check
from gateway.cli.errors import CommandError
from gateway.cli.keys import keys
from gateway.cli.ledger import ledger
from gateway.cli.serve import serve_command
from gateway.cli.tenants import tenants
from gateway.cli.usage import usage
from gateway.listening import PortUnavailable
from gateway.settings_errors import ConfigError
from gateway.version import __version__

# Usage errors derive from this; typer does not export it under a name of its own.
_ClickException: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="forebay",
    help="A multi-tenant LLM inference gateway that runs the models itself.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve_command)
app.command("chat")(chat)
app.command("check")(check)
app.command("audit")(audit)
app.add_typer(cache, name="cache")
app.add_typer(keys, name="keys")
app.add_typer(tenants, name="tenants")
app.add_typer(ledger, name="ledger")
app.command("usage")(usage)

_DISK_TROUBLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})

_MOUNTED = "forebay.commands"
"""The entry points by which others add commands of their own: each names a typer app."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"forebay {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Say which one."),
    ] = False,
) -> None:
    """A multi-tenant LLM inference gateway that runs the models itself."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with one of `exit_codes`."""
    # whoever started us may have closed them: what is written there goes nowhere then
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    code = run(arguments)
    # On its way out the interpreter would walk every module and vocabulary for garbage, a second of
    # a core, and all of it goes with the process anyway.
    gc.freeze()
    sys.exit(code)


def run(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        if arguments is None:
            arguments = sys.argv[1:]
        _mount_others(arguments)
        code = app(arguments or ["--help"], prog_name="forebay", standalone_mode=False)
    except ConfigError as error:
        return _complain(exit_codes.USAGE, *error.messages)
    except PortUnavailable as error:
        return _complain(exit_codes.PORT_UNAVAILABLE, str(error))
    except CommandError as error:
        return _complain(error.exit_code, str(error))
    except (typer.Abort, KeyboardInterrupt):
        return exit_codes.INTERRUPTED
    except BrokenPipeError:
        # whoever read our output has gone
        give_up_output()
        return exit_codes.FAILURE
    except UnicodeEncodeError as error:
        message = f"a character here cannot be sent or written as {error.encoding}"
        return _complain(exit_codes.USAGE, message)
    except OSError as error:
        if error.errno not in _DISK_TROUBLE:
            raise
        give_up_output()
        return _complain(exit_codes.FAILURE, f"the output cannot be written ({error.strerror})")
    except _ClickException as error:
        message = error.format_message()  # type: ignore[attr-defined] # see _ClickException
        # of a choice it says what kind of Python's errors it is
        return _complain(exit_codes.USAGE, message.replace(": Value error, ", ": ", 1))
    return code if isinstance(code, int) else exit_codes.OK


def _mount_others(arguments: list[str]) -> None:
    """Add the commands of others, unless one of ours is asked for: loading them takes time."""
    ours = {each.name for each in app.registered_commands}
    ours |= {each.name for each in app.registered_groups}
    if arguments and arguments[0] in ours:
        return
    for entry in entry_points(group=_MOUNTED):
        if entry.name not in ours:
            app.add_typer(entry.load(), name=entry.name)


def _complain(code: int, *messages: str) -> int:
    for message in messages:
        sys.stderr.write("forebay: " + " ".join(message.split()) + "\n")
    return code
