"""Checkpoints on disk: their headers, their shapes, their numbers under canonical names."""
