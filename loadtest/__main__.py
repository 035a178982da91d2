"""Makes `python -m loadtest` the command."""

from loadtest.cli.main import main

main()
