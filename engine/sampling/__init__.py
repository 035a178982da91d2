"""Choosing tokens: batched, stateless, and the same for a row whatever runs beside it."""
