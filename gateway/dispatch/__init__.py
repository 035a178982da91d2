"""Which replica gets a request, what became of it there, and who gets it when that one is lost."""
