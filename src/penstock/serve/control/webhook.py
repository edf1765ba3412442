"""Tells a URL of tenants' usage and budgets, as Standard Webhooks are: signed, and until it has them.

Settlements of gateways bring the URL; what there is to tell stands in the usage store.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import sqlite3
import time
from urllib.parse import urlsplit

import aiohttp

from penstock.serve.tenancy.notices import Notice
from penstock.serve.tenancy.store import UsageStore

log = logging.getLogger(__name__)

_EVERY_S, _MOST_S = 10.0, 300.0
_ANSWER_S = 10.0


class Webhook:
    """Between the first `follow` and `close`."""

    def __init__(self, secret: str) -> None:
        """secret: "" to sign nothing."""
        self._secret = secret
        self._url = ""
        self._telling: asyncio.Task[None] | None = None

    def follow(self, url: str, store: UsageStore) -> None:
        """Tells this URL from now on; "" for none."""
        if url != self._url:
            self.close()
            self._url = url
            self._telling = asyncio.create_task(self._tell(url, store)) if url else None

    def close(self) -> None:
        if self._telling is not None:
            self._telling.cancel()

    async def _tell(self, url: str, store: UsageStore) -> None:
        pause_s = _EVERY_S
        limit = aiohttp.ClientTimeout(total=_ANSWER_S)
        async with aiohttp.ClientSession(timeout=limit, trust_env=True) as session:
            while True:
                await asyncio.sleep(pause_s)
                try:
                    while notices := await asyncio.to_thread(store.untold):
                        for notice in notices:
                            await self._send(session, url, notice)
                            await asyncio.to_thread(store.told, notice)
                    pause_s = _EVERY_S
                except Exception as error:  # of any kind: usage must be told in the end
                    pause_s = min(2 * pause_s, _MOST_S)
                    unknown = not isinstance(error, aiohttp.ClientError | TimeoutError | sqlite3.Error)
                    host, why = urlsplit(url).hostname, str(error) or "no answer in time"
                    said = "The webhook at %s is told again in %.0f s: %s"
                    log.warning(said, host, pause_s, why, exc_info=unknown)

    async def _send(self, session: aiohttp.ClientSession, url: str, notice: Notice) -> None:
        body, at = notice.body(), int(time.time())
        headers = {"content-type": "application/json", "webhook-id": notice.id, "webhook-timestamp": str(at)}
        if self._secret:
            headers["webhook-signature"] = signature(self._secret, notice.id, at, body)
        async with session.post(url, data=body, headers=headers, allow_redirects=False) as answer:
            if not 200 <= answer.status < 300:
                raise aiohttp.ClientError(f"it answers with {answer.status}")


def signature(secret: str, notice_id: str, at: int, body: bytes) -> str:
    """Of the Standard Webhooks. secret: `whsec_` and base64, or any other text."""
    text = secret.removeprefix("whsec_")
    key = secret.encode() if text == secret else base64.b64decode(text)
    digest = hmac.digest(key, b"%s.%d.%s" % (notice_id.encode(), at, body), "sha256")
    return f"v1,{base64.b64encode(digest).decode()}"
