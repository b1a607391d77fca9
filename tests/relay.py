"""A TCP relay before a port of this machine, as `ssh -L` and `docker -p` are."""

from __future__ import annotations

import contextlib
import socket
import threading


class Relay:
    """A TCP relay in front of a port of this machine; `cut` closes all connections and refuses new ones."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = port
        self._open = True
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._server = socket.create_server((host, 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            if not self._open:
                client.close()
                continue
            upstream = socket.create_connection(("127.0.0.1", self._target))
            self._pairs.append((client, upstream))
            for source, target in ((client, upstream), (upstream, client)):
                threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        self._open = False
        for pair in self._pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def restore(self) -> None:
        self._open = True

    def close(self) -> None:
        self._server.close()
