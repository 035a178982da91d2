"""One row for every request that was let in: what it used, what it cost, and how it went.

Rows are noted on the event loop and written soon after; what the database cannot take waits in a
file beside it. `gateway.ledger.opening.open_ledger` opens all of it.
"""
