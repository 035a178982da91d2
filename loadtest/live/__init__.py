"""Sending a load to a server, and noting what comes back when."""
