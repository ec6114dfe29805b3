"""The servers of ``benchmarks/calibration.py``, each in a process of its own on a free port."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.engine_parts.machine import ROOT

__all__ = ["running", "running_tei", "running_vllm"]

START_S = 300.0
_VLLM = [
    *("--dtype", "float32", "--enforce-eager", "--disable-log-stats", "--seed", "0"),
    *("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(2**28)),
]
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@contextmanager
def running_vllm(model: Path, name: str, logs: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """The OpenAI-compatible server of vLLM; the URL of its ``/v1``.

    Args:
        model: a directory in the Hugging Face layout.
        name: as requests name the model.
        logs: the directory for what it says; its processes start from there, too.
        options: such as ``--runner pooling``.
    """
    # Each of its processes has to hide libraries of other torch builds before transformers comes.
    site = logs / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text("import graphpo_agent\n")
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    chosen = ["--served-model-name", name, "--host", "127.0.0.1", *_VLLM, *options]
    with running(name, [*command, *chosen, "--port"], logs, [site, ROOT]) as address:
        yield f"{address}/v1"


@contextmanager
def running_tei(encoder: Path, logs: Path) -> Iterator[str]:
    """A server of ``benchmarks.calibration_parts.tei``; its URL."""
    command = ["-m", "benchmarks.calibration_parts.tei", str(encoder)]
    with running("tei", command, logs, [ROOT]) as address:
        yield address


@contextmanager
def running(name: str, command: Sequence[str], logs: Path, paths: Sequence[Path]) -> Iterator[str]:
    """A server that answers ``/health``; a free port is put behind the command."""
    port = _free_port()
    address = f"http://127.0.0.1:{port}"
    log = logs / f"{name}.log"
    environment = os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    with log.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, *command, str(port)],
            cwd=logs,
            env=environment,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait(address, process, log)
            yield address
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, and then make it, with all processes of its session: vLLM has several."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    last = "\n".join(log.read_text().splitlines()[-20:])
    raise SystemExit(f"a server does not answer within {START_S:.0f} s:\n{last}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
