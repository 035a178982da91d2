"""Recorded traffic: reading it, scaling it, and making prompts of it."""
