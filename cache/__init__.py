"""Where prompt KV lives and who has it: identity, hashing and device pages."""
