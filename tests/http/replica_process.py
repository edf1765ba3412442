"""Run as a program: a simulated replica that prints where it listens and serves until it is killed."""

import asyncio
import json
import os
import sys

import uvloop
from served import Replica

from penstock import lifeline


async def main() -> None:
    replica = await Replica.start(sys.argv[1], **json.loads(sys.argv[2]))
    print(json.dumps(replica.address.to_metadata()), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    lifeline.tie_to(os.getppid())
    uvloop.run(main())
