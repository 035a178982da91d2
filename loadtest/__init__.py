"""The proof: workloads, clients and tables that measure any OpenAI-compatible server."""
