"""Attention over paged KV in torch: one contract, a plain reference, a batched implementation."""
