"""What gateways that share a Redis tell each other: where they sent which prefix, and how much of
their own work each shared replica has. No leader, nothing to agree on: news that is lost costs a
worse guess, never a wrong answer."""
