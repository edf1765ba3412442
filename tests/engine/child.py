"""A small server to be somebody's child, on port `argv[1]`: the simulator, or what else `argv[2:]` asks for.

NAME=VALUE: options of the simulator, and its `name`. echo: answers everything with the request's headers.
flood: answers with 64 MiB of events, and /sent with how many bytes of them are on their way. silent: is never
ready. deaf: does not heed SIGTERM until it is. grandchild: starts a process in a session of its own.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import uvicorn
import yaml

from penstock.asgi import ASGIApp, Receive, Scope, Send
from penstock.config import LLMConfig
from penstock.engines.sim.engine import SimEngine

MODEL_ID = "model:under/test"


async def simulator(options: dict[str, object]) -> ASGIApp:
    config = {"model_loading_config": {"model_id": options.pop("name", MODEL_ID)}, "llm_engine": "sim"}
    engine = SimEngine(LLMConfig.parse({**config, "engine_kwargs": options}))
    await engine.start()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        """With vLLM's endpoint for adapters."""
        if scope["path"] != "/v1/load_lora_adapter":
            return await engine.app()(scope, receive, send)
        asked = json.loads((await receive())["body"])
        await engine.load_adapter(asked["lora_name"].removeprefix(f"{MODEL_ID}:"), Path(asked["lora_path"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        return await send({"type": "http.response.body", "body": b""})

    return app


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    said = json.dumps([[name.decode(), value.decode()] for name, value in scope["headers"]]).encode()
    headers = [(b"content-type", b"application/json"), (b"x-penstock-secret", b"told")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": said})


class Flood:
    """64 MiB for whoever asks: more than all buffers between two processes hold."""

    PIECE = b"data: " + b"x" * (1 << 16) + b"\n\n"
    PIECES = 1024
    sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counted = scope["path"] == "/sent"
        kind = b"application/json" if counted else b"text/event-stream"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        for _ in range(0 if counted or scope["method"] == "GET" else self.PIECES):
            await send({"type": "http.response.body", "body": self.PIECE, "more_body": True})
            self.sent += len(self.PIECE)
        await send({"type": "http.response.body", "body": str(self.sent).encode() if counted else b""})


async def main(port: int, wishes: list[str]) -> None:
    pairs = (wish.partition("=") for wish in wishes if "=" in wish)
    others = {"echo": echo, "flood": Flood()}
    other = next((app for wish, app in others.items() if wish in wishes), None)
    app = other or await simulator({name: yaml.safe_load(value) for name, _, value in pairs})
    config = uvicorn.Config(app, port=port, lifespan="off", interface="asgi3", log_level="warning")
    await uvicorn.Server(config).serve()


if __name__ == "__main__":
    number, *asked = sys.argv[1:]
    if "deaf" in asked:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "grandchild" in asked:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    if "silent" in asked:
        print("I shall say nothing.", flush=True)
        time.sleep(600)
    asyncio.run(main(int(number), asked))
