"""Makes `python -m loadtest.peers` the command."""

from loadtest.peers.command import main

main()
