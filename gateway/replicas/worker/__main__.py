"""The worker's program: `python -m gateway.replicas.worker FD`, started by `process.py`."""

from __future__ import annotations

import sys

from gateway.replicas.worker.child import work
from gateway.replicas.worker.model_engine import open_model

if __name__ == "__main__":
    sys.exit(work(int(sys.argv[1]), open_model))
