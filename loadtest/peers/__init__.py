"""Other servers and routers, installed and started for a comparison on the same machine."""
