"""A trainer that forks checkpoint writers under a live watch: 200 children that compute and leave.

Argument: JSON with server, model, keeper. Says how many children did not end in time, and what a child that used the
client was told.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
from refit_client import RefitClient, RefitError, VersionSealed

CONFIG = json.loads(sys.argv[1])
CHILDREN = 200
AT_ONCE = 20
# The slowest of a batch; a hung child would wait forever.
WAIT_SECONDS = 20.0


def write_checkpoint() -> None:
    torch.ones(64, 64).sum().item()
    os._exit(0)


def end_of(children: list[int]) -> int:
    """Waits for them; kills and counts those that hang."""
    until, hung = time.monotonic() + WAIT_SECONDS, 0
    for child in children:
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                hung += 1
                break
            time.sleep(0.002)
    return hung


def told(client: RefitClient) -> str:
    """What a forked child hears that uses the client."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            client.versions(timeout=timedelta(seconds=5))
            os.write(write, b"nothing")
        except RefitError as error:
            os.write(write, error.reason.encode())
        client.close()  # the parent's session must survive it
        os._exit(0)
    hung = end_of([child])
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        return "hung" if hung else pipe.read().decode()


def main() -> None:
    torch.set_num_threads(1)
    client = RefitClient(CONFIG["server"], model=CONFIG["model"], keeper=CONFIG["keeper"], linger=timedelta(0))
    hung, versions = 0, []
    with client.subscribe() as subscription:
        for batch in range(CHILDREN // AT_ONCE):
            result = client.publish({"w": torch.full((16,), float(batch))}, batch, timeout=timedelta(seconds=30))
            children = []
            for _ in range(AT_ONCE):
                child = os.fork()
                if child == 0:
                    write_checkpoint()
                children.append(child)
            hung += end_of(children)
            assert result is not None
            versions.append(next(event.version for event in subscription if isinstance(event, VersionSealed)))
    answer = told(client)
    after = client.pull().version.version
    client.close()
    print(json.dumps({"hung": hung, "versions": versions, "told": answer, "after": after}), flush=True)


main()
