"""Files and batches: requests that are brought in bulk and answered within a day, in the gaps."""
