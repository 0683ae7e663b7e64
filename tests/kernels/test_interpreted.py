"""Runs the tests of `interpreted/`: Triton decides when it is imported whether kernels are interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


def _run(marks: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marks, str(FOLDER)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_the_kernels_under_the_interpreter() -> None:
    _run("not slow")


@pytest.mark.slow
def test_the_kernels_under_the_interpreter_in_full() -> None:
    _run("slow")
