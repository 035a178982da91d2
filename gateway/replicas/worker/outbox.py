"""A worker's way out: messages from any thread onto one socket, none of them dropped."""

from __future__ import annotations

import socket
import threading
from collections import deque

from gateway.replicas.worker.frames import to_frame
from gateway.replicas.worker.messages import FromWorker


class Outbox:
    """Sends at once what the socket takes at once; the rest waits for a thread that sends it.

    So a step's report costs its thread one system call, and a gateway that does not read holds up
    no step: what waits is bounded by the requests it has sent. Once the gateway has gone, messages
    go nowhere.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._changed = threading.Condition()
        self._waiting: deque[memoryview] = deque()  # guarded by _changed, like the next two
        self._gone = False
        self._closing = False
        self._thread = threading.Thread(target=self._send_waiting, name="forebay-outbox")
        self._thread.daemon = True  # a gateway that never reads must not keep the process
        self._thread.start()

    def send(self, message: FromWorker) -> None:
        """Never blocks. Messages of one thread arrive in order."""
        frame = memoryview(to_frame(message))
        with self._changed:
            if self._gone or self._closing:
                return
            if not self._waiting:
                frame = frame[self._send_some(frame) :]
            if frame:
                self._waiting.append(frame)
                self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Wait until all has been sent, at most `timeout_s`; take nothing more."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _send_some(self, frame: memoryview) -> int:
        try:
            return self._socket.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            self._gone = True
            return len(frame)

    def _send_waiting(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                frame = self._waiting[0]  # stays there, so that nobody sends past it
            try:
                self._socket.sendall(frame)
            except OSError:
                with self._changed:
                    self._gone = True
                    self._waiting.clear()
                continue
            with self._changed:
                self._waiting.popleft()
