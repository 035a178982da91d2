"""Makes `python -m loadtest` the command."""

from loadtest.cli import main

main()
