"""Replicas that are processes of their own, with interpreter and cores apart from ours."""
