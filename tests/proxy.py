"""A TCP proxy that cuts a connection at a chosen command, before or after the server has got it."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class Proxy:
    """Stands before a server. `cut(marker, ...)` arms it: the next connection that sends the marker's bytes is cut.

    With `deliver`, the server gets the command and its reply is swallowed; without, the server never hears of it.
    """

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._marker = b""
        self._deliver = True
        self.cuts = 0
        self.port: int = self._listener.getsockname()[1]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def cut(self, marker: bytes, *, deliver: bool) -> None:
        self._marker, self._deliver = marker, deliver

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                swallowing = threading.Event()
                threading.Thread(target=self._forward, args=(client, server, swallowing), daemon=True).start()
                threading.Thread(target=self._reply, args=(server, client, swallowing), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket, swallowing: threading.Event) -> None:
        tail = b""
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if self._marker and self._marker in tail + data:
                    self._marker = b""
                    self.cuts += 1
                    swallowing.set()
                    if not self._deliver:
                        break
                    self._deliver_rest(client, server, data)
                    break
                tail = data[-64:]
                server.sendall(data)
        self._close(client, server)

    def _deliver_rest(self, client: socket.socket, server: socket.socket, data: bytes) -> None:
        """Give the server the whole command, and time to do it."""
        client.settimeout(0.1)
        with contextlib.suppress(TimeoutError):
            while data:
                server.sendall(data)
                data = client.recv(65536)

    def _reply(self, server: socket.socket, client: socket.socket, swallowing: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if not swallowing.is_set():
                    client.sendall(data)
        self._close(client, server)

    def _close(self, *sockets: socket.socket) -> None:
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
