"""Decisions only: no I/O, no clock, no hidden randomness, no imports from other rooms."""
