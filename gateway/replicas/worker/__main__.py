"""The worker's program: `python -m gateway.replicas.worker FD`, started by `process.py`."""

from __future__ import annotations

import gc
import sys


def main() -> int:
    """Returns the exit code."""
    # Nearly all that is imported and loaded stays, and walking it again and again takes half a
    # second. The worker collects garbage once it serves.
    gc.disable()
    from gateway.replicas.worker.child import work
    from gateway.replicas.worker.model_engine import open_model

    return work(int(sys.argv[1]), open_model)


if __name__ == "__main__":
    sys.exit(main())
