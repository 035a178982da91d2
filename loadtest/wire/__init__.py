"""HTTP from the client's side."""
