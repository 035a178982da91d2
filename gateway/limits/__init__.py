"""Holds tenants, keys and models to their limits: reserve, then settle or abandon."""
