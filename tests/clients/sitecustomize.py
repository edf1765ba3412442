"""Python reads this at the start of each program of this folder: one that reaches for another machine ends.

A library that downloads a tokenizer, or reports its use, would otherwise pass wherever there is a network.
"""

import os
import sys
from typing import Any

LOCAL = {"127.0.0.1", "localhost", "::1", "", None}


def _local_only(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    if (host.decode() if isinstance(host, bytes) else host) not in LOCAL:
        print(f"reached for {host}", file=sys.stderr, flush=True)
        os._exit(3)  # an exception could be caught, and the library go on


sys.addaudithook(_local_only)
