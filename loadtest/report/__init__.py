"""Runs as a page that is opened by someone who was not there."""
