"""Dated result files: what was measured, on what, with which versions, settings and commit."""

import json
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("twining", "torch", "numpy", "tokenizers", "starlette", "uvicorn")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """Short commit, with `+` when tracked files differ from it; `unknown` outside a checkout."""
    here = Path(__file__).resolve().parent

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short", "HEAD")
    return (commit + ("+" if git("status", "--porcelain", "-uno") else "")) if commit else "unknown"


def environment(cpus: int) -> dict[str, Any]:
    """Hardware, versions, commit and time of a run on `cpus` CPUs."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cpus": cpus,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def save(name: str, result: dict[str, Any]) -> Path:
    """Write benchmarks/results/<date>-<name>.json and return its path."""
    RESULTS.mkdir(exist_ok=True)
    day = datetime.now(UTC).date().isoformat()
    path = RESULTS / f"{day}-{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
