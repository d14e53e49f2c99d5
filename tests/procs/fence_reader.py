"""A reader in a process of its own: reads a file's bytes in two halves under a remote fence.

Arguments as JSON: address, domain, file, ttl (seconds), validate, step (wait for a line on stdin between the halves).
Writes one JSON line per event: {"at": "half"}, {"accepted": [first, last, ...]} or {"refused": REASON}. Ends at the end
of stdin, or after `rounds` reads. Started by tests/faults/test_remote_fences.py.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

from refitd.agent.remote_fence import RemoteFences
from refitd.domain.errors import RefitError


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


def main() -> None:
    config = json.loads(sys.argv[1])
    file, ttl = Path(config["file"]), timedelta(seconds=config["ttl"])
    with RemoteFences(config["address"]) as fences, file.open("rb", buffering=0) as stream:
        for _ in range(config.get("rounds", 1)):
            try:
                with fences.acquire(config["domain"], owner="reader", timeout=timedelta(seconds=30), ttl=ttl) as fence:
                    stream.seek(0)
                    half = file.stat().st_size // 2
                    got = stream.read(half)
                    if config.get("step"):
                        say(at="half")
                        sys.stdin.readline()
                    got += stream.read(half)
                    if config.get("validate", True):
                        fence.check()
                    say(accepted=sorted(set(got)))
            except RefitError as error:
                say(refused=error.reason)


if __name__ == "__main__":
    main()
