"""Entry of the agent process: runtime.children starts it with SOCKET_FD MEMORY_FD PARENT_PID. No torch."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys


def main() -> None:
    """Run until the training process is gone or has said goodbye."""
    from atoll.runtime.children import ignore_signals

    ignore_signals()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    socket_fd, memory_fd, parent = map(int, sys.argv[2:5])
    from atoll.errors import AtollError
    from atoll.runtime.agent import AgentDriver
    from atoll.runtime.scheduling import yield_to_training

    yield_to_training()
    gc.freeze()
    driver = AgentDriver(socket.socket(fileno=socket_fd), memory_fd, parent)
    try:
        code = asyncio.run(driver.run())
    except AtollError as error:
        print(f"atoll agent: {error}", file=sys.stderr, flush=True)
        code = 1
    # The goodbye is delivered; what gRPC still has to tear down would only cost time.
    os._exit(code)


if __name__ == "__main__":
    main()
