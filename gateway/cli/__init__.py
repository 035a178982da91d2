"""The `forebay` command. Importing it must stay cheap: torch is imported by `serve` alone."""

try:
    from gateway.cli.main import main
except KeyboardInterrupt:
    # Ctrl-C before `main` is there to answer it: the same exit, and no traceback of an import
    from gateway.cli.exit_codes import INTERRUPTED

    raise SystemExit(INTERRUPTED) from None

__all__ = ["main"]
