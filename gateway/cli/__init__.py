"""The `forebay` command. Importing it must stay cheap: torch is imported by `serve` alone."""

from gateway.cli.main import main

__all__ = ["main"]
