"""The one place that says which forebay this is."""

__version__ = "0.1.0"
