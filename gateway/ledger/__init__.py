"""One row for every request that was let in: what it used, what it cost, and how it went."""
