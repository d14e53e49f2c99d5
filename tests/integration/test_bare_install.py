"""A plain `pip install refitd`, without extras, in an empty environment: the daemon runs, the client imports, no torch.

Builds the wheel and installs it with its dependencies, so it needs the package index that pip is configured for.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from integration.daemon_process import DaemonProcess

REPOSITORY = Path(__file__).parents[2]
INSTALL_SECONDS = 270
HEAVY = ("torch", "numba", "vllm", "megatron", "ray")


def run(*command: str | Path, timeout: float = 60) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_without_extras_the_daemon_serves_and_the_client_imports_without_torch(tmp_path: Path) -> None:
    run(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path / "wheel", REPOSITORY,
        timeout=INSTALL_SECONDS,
    )  # fmt: skip
    (wheel,) = (tmp_path / "wheel").iterdir()
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheel, timeout=INSTALL_SECONDS)

    # -I: neither the working directory nor PYTHONPATH, so that only what was installed can be imported.
    found = run(
        python, "-I", "-c",
        "import importlib.util, sys, refit_client\n"
        f"print([name for name in {HEAVY!r} if importlib.util.find_spec(name) or name in sys.modules])\n"
        "print(refit_client.__file__)",
    )  # fmt: skip
    heavy, where = found.splitlines()
    assert heavy == "[]"
    assert Path(where).is_relative_to(home)

    refitd = home / "bin" / "refitd"
    assert run(refitd, "--version").startswith("refitd ")
    with DaemonProcess(tmp_path / "state", command=[str(refitd)]) as daemon:
        assert '"term"' in run(refitd, "status", "--server", daemon.address, "--json")
        assert daemon.terminate() == 0


def test_the_daemon_imports_nothing_heavy_where_it_is_installed() -> None:
    code = f"import sys, refitd.cli.serve\nprint([name for name in {HEAVY!r} if name in sys.modules])\n"
    assert run(sys.executable, "-c", code).strip() == "[]"
