"""`forebay loadtest`, also `python -m loadtest`."""
