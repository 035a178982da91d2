"""`python -m gateway.cli`: the command without its script."""

from gateway.cli.main import main

main()
