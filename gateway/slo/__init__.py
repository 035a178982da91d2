"""Whether tenants get what they were promised: attainment, goodput, and what follows from it."""
