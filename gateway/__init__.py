"""HTTP in, SSE out: keys, tenants, the journey of a request, replicas, metrics, command line."""
