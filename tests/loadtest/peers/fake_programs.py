"""Programs that behave like a peer's process, well or badly; all they need is Python."""

from __future__ import annotations

import sys

SLEEP = "import time; time.sleep(600)"

FAMILY = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-ISc", {SLEEP!r}])
print("started", flush=True)
"""
"""A parent that has a child; what it does then comes behind."""

STUBBORN = f"""
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
{FAMILY}
{SLEEP}
"""

SERVER = """
import os, socket, sys
print("the log says so", flush=True)
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    client, _ = listener.accept()
    asked = client.recv(65536).decode()
    allowed = "authorization: Bearer " + os.environ["FAKE_KEY"] in asked
    status = "200 OK" if allowed and asked.startswith("GET /ready ") else "503 Busy"
    client.sendall(f"HTTP/1.1 {status}\\r\\ncontent-length: 0\\r\\n\\r\\n".encode())
    client.close()
"""
"""Ready at once at /ready, for whoever has the key."""


def python(script: str, *arguments: str) -> tuple[str, ...]:
    """Its command line."""
    return (sys.executable, "-ISc", script, *arguments)
