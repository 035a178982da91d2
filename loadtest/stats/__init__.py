"""Figures: distributions, goodput, cost, intervals, and what queueing theory expects."""
