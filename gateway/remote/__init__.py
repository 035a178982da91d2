"""Models that run on servers elsewhere: requests relayed to them, answers relayed back."""
