"""Recorded traffic: read from files, scaled, described, and made of loads."""
