"""Servers elsewhere that tell what their caches hold."""
