"""Other servers, installed and started here for a side-by-side on one machine."""
