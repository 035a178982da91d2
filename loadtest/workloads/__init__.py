"""What is sent: workloads by name, when they arrive, and for whom."""
