"""Tenants and keys made at run time, beside those of the configuration file."""
