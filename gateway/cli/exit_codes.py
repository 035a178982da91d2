"""What `forebay` returns to the shell. Documented in docs/operations.md."""

OK = 0
FAILURE = 1
"""It could not be done: a model does not load, the server is not there, it refused."""
USAGE = 2
"""The command line or the configuration is wrong."""
PORT_UNAVAILABLE = 3
"""The address cannot be listened on."""
INTERRUPTED = 130
"""Ctrl-C, in a command that has nothing to drain; in `serve`, a second one."""
