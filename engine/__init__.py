"""Token ids in, token ids out: weights, decoder, executors, scheduler loop and sampling."""
