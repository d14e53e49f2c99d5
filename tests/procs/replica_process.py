"""A replica in a process of its own, so that it can be killed. Says its state in JSON lines; ends when stdin does.

Started by tests of engines that die. Its argument is JSON: server, model, replica, and weights: name -> shape
(float32), and maybe `transports`: their names. It writes one line when it is made, and one per version that it serves.
With `hold` its first pull stops once all shares are open, for good, and says so.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from datetime import timedelta

import torch

from refitd.agent import pull as pull_module
from refitd.agent.gate import AdmissionGate
from refitd.agent.install import InstallAgent, InstallTimeouts
from refitd.agent.pull import Puller
from refitd.agent.replica import connect_replica
from refitd.engine.module import ModuleEngine
from refitd.transport.select import transports_named


def hold(*_: object) -> None:
    print(json.dumps({"at": "held"}), flush=True)
    time.sleep(600)


def main() -> None:
    config = json.loads(sys.argv[1])
    weights = {name: torch.zeros(shape) for name, shape in config["weights"].items()}
    gate = AdmissionGate()
    session = connect_replica(
        config["server"], model=config["model"], replica=config["replica"], kind="module", num_ranks=1
    )
    if config.get("hold"):
        pull_module._check_lists = hold
    puller = Puller(transports_named(config["transports"]) if "transports" in config else None)
    engine = ModuleEngine(weights, fetch=puller.fetch)
    timeouts = InstallTimeouts(retry=timedelta(milliseconds=50))
    agent = InstallAgent(session, engine, gate, replica=config["replica"], timeouts=timeouts)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    said = -1
    while not ended.is_set():
        if agent.version != said:
            said = agent.version
            digest = hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()
            first = [float(t.flatten()[0]) for t in weights.values()]
            print(json.dumps({"version": said, "first": first, "digest": digest}), flush=True)
        time.sleep(0.02)
    agent.close()
    session.close()
    puller.close()


main()
