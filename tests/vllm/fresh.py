"""Prints what vLLM computes after loading each checkpoint by itself: fresh.py TP CHECKPOINT..."""

from __future__ import annotations

import gc
import json
import sys

from tiny import llm_args, measure, unlink_segments


def main() -> None:
    from vllm import LLM

    tp, *paths = sys.argv[1:]
    found = {}
    for path in paths:
        llm = LLM(**llm_args(path, int(tp)))
        found[path] = measure(llm)
        unlink_segments()
        del llm
        gc.collect()
    print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
