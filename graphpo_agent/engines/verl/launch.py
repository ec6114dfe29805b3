"""verl's configuration, composed; Ray, started and ended. verl and Ray are imported when needed."""

import io
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from graphpo_agent.engines.ports import own_port
from graphpo_agent.engines.verl.nodes import check_nodes
from graphpo_agent.errors import ConfigError, GraphPOError, RunError

__all__ = [
    "SEE_LOG",
    "begin_process",
    "cause_of",
    "check_answers",
    "compose",
    "environment",
    "is_installed",
    "launch",
    "runtime_environment",
    "validate",
]

SEE_LOG = "(set GRAPHPO_RAY_LOG=1 to see what the processes say)"
_POLL_SECONDS = 1.0
_ANSWER_SECONDS = 10.0
_DIRECTORY = "GRAPHPO_DIRECTORY"
_PLUGIN = "graphpo_agent.engines.verl.cpu"
_CPUS = 64
"""Ray counts a CPU for every process, most of which wait."""


def is_installed() -> bool:
    """Whether verl is there."""
    return find_spec("verl") is not None


def compose(settings: Mapping[str, Any], overrides: Sequence[str]) -> Any:
    """Verl's whole configuration, with our settings and then the user's.

    Args:
        settings: by dotted name; ``+`` before a name that verl does not know itself.
        overrides: as for verl's command line.

    Raises:
        ConfigError: verl has no such setting, or cannot read an override.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    spec = find_spec("verl")
    assert spec is not None and spec.submodule_search_locations
    directory = Path(spec.submodule_search_locations[0]) / "trainer" / "config"
    try:
        with initialize_config_dir(str(directory), version_base=None):
            config = hydra_compose("ppo_trainer")
        for name, value in settings.items():
            if not name.startswith("+"):
                OmegaConf.update(config, name, value, merge=False)
        OmegaConf.set_struct(config, False)
        for name, value in settings.items():
            if name.startswith("+"):
                OmegaConf.update(config, name[1:], value, merge=True)
        OmegaConf.set_struct(config, True)
        OmegaConf.to_container(config, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"verl's configuration cannot be made: {_line(error)}") from error
    for override in overrides:
        try:
            _override(config, override)
        except (OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(f"engine.overrides: {override!r}: {_line(error)}") from error
    return config


def _override(config: Any, override: str) -> None:
    """Apply one ``name=value``, or ``+name=value`` for a name that verl does not know."""
    from omegaconf import OmegaConf, open_dict

    name, separator, value = override.partition("=")
    if not separator or not name.lstrip("+"):
        raise ConfigError(f"engine.overrides: {override!r} is not name=value")
    parsed = OmegaConf.create(f"value: {value}").value
    with open_dict(config) if name.startswith("+") else nullcontext():
        OmegaConf.update(config, name.lstrip("+"), parsed)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def validate(config: Any) -> None:
    """Ask verl whether its settings go together.

    Raises:
        ConfigError: they do not.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    try:
        with redirect_stdout(io.StringIO()):
            validate_config(
                config=config,
                use_reference_policy=need_reference_policy(config),
                use_critic=need_critic(config),
            )
    except (
        ValueError,
        AssertionError,
        KeyError,
        TypeError,
        AttributeError,
        HydraException,
        OmegaConfBaseException,
    ) as error:
        raise ConfigError(f"verl refuses its configuration: {_line(error)}") from error


def environment(device: str, kv_cache_gib: float, shares_prefixes: bool) -> dict[str, str]:
    """Environment variables of all processes of a run.

    Args:
        device: ``cuda`` or ``cpu``.
        kv_cache_gib: memory of a server for keys and values, on a CPU.
        shares_prefixes: whether our engine (``engine.py``) updates instead of verl's.
    """
    here = Path(__file__).parent
    paths = [str(here / "cpu_start")] if device == "cpu" else []
    paths += [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    variables = {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path for path in paths if path)),
        _DIRECTORY: os.getcwd(),
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }
    if shares_prefixes:
        variables["VERL_ENGINE_VENDOR"] = "graphpo"  # under which it is registered
    if device == "cpu":
        variables |= {
            "VERL_PLATFORM": "cpu",
            "VERL_ENGINE_DEVICE": "cuda",  # verl's FSDP engine is registered under that name only
            "VERL_USE_EXTERNAL_MODULES": _PLUGIN,
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(kv_cache_gib))),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            # vLLM would put every server on the same cores, and ranks of one on none.
            "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        }
    return variables


def runtime_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    """What Ray is told of all processes of a run: their variables, and how each begins."""
    begins = f"{__name__}.{begin_process.__name__}"
    return {"env_vars": dict(variables), "worker_process_setup_hook": begins}


def begin_process() -> None:
    """Give vLLM a port of this process's own, and go to where the run was started.

    Its paths are meant from there, if that is there; a process of a cluster that ran already begins
    where ``ray start`` was called.
    """
    os.environ["VLLM_PORT"] = str(own_port())
    directory = os.environ[_DIRECTORY]
    if os.path.isdir(directory):
        os.chdir(directory)


def check_answers(address: str) -> None:
    """Check that somebody listens at a cluster's address: Ray would ask for twelve minutes.

    Args:
        address: ``host:port``; any other is Ray's to find.

    Raises:
        RunError: nobody does.
    """
    host, _, port = address.rpartition(":")
    if "/" in host or not (host and port.isdecimal()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise RunError(
            f"engine.ray_address {address}: no Ray cluster is there ({error}); start one with ray "
            "start --head, or leave ray_address out"
        ) from error


def launch(
    config: Any,
    variables: Mapping[str, str],
    ray_address: str | None,
    gpus: int | None,
    paths: Sequence[str],
    watch: Callable[[], None],
) -> None:
    """Run verl's trainer in Ray until it ends; Ray is left in any case.

    Args:
        config: composed.
        variables: of all processes.
        ray_address: a cluster that runs; None: one of this process's own, which ends with it.
        gpus: how many "GPUs" a cluster of one's own counts; None: those that are there.
        paths: files and directories that all nodes need.
        watch: called about once a second; what it raises ends the run.

    Raises:
        GraphPOError: what ended the run early.
        RunError: Ray cannot be started, or a process of the run ended.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    logging.disable(logging.WARNING)  # verl warns that this process, too, has no accelerator
    try:
        runner, shared = _task_runner(), _verls_environment(config)
    finally:
        logging.disable(logging.NOTSET)
    _start_ray(ray_address, gpus, shared | dict(variables))
    try:
        _check_free()
        if ray_address is not None:
            check_nodes(paths)
        ended = runner.remote().run.remote(config)
        while True:
            try:
                ray.get(ended, timeout=_POLL_SECONDS)
                return
            except GetTimeoutError:
                watch()
    except RayError as error:
        raise _reason(error) from error
    finally:
        ray.shutdown()


def _start_ray(address: str | None, gpus: int | None, variables: dict[str, str]) -> None:
    """Connect to a cluster, or start one, whatever others there are on this machine."""
    import ray
    from ray.exceptions import RayError

    cluster: dict[str, Any] = {"address": address}
    if address is None:
        cluster = {"address": "local", "num_cpus": _CPUS, "num_gpus": gpus}
        cluster["include_dashboard"] = False
    try:
        ray.init(
            **cluster,
            runtime_env=runtime_environment(variables),
            logging_level=logging.ERROR,
            log_to_driver=bool(os.environ.get("GRAPHPO_RAY_LOG")),
        )
    except (RayError, ConnectionError, ValueError, RuntimeError) as error:
        raise RunError(f"Ray cannot be started: {_line(error)}{_of_token(address)}") from error


def _of_token(address: str | None) -> str:
    """What may be wrong with a cluster that answers: Ray finds its token by itself for "auto"."""
    if address in (None, "auto") or "RAY_AUTH_MODE" in os.environ:
        return ""
    return "; where the cluster asks for a token, set RAY_AUTH_MODE=token (docs/verl.md)"


def _verls_environment(config: Any) -> dict[str, str]:
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    return {"TRANSFER_QUEUE_ENABLE": "1"} | get_ppo_ray_runtime_env(config)["env_vars"]


def _check_free() -> None:
    """Raise RunError where a run is on the cluster: verl's second would end the first one's queue.

    The first would wait for it until its patience ends.
    """
    import ray

    try:
        ray.get_actor("TransferQueueController", namespace="transfer_queue")
    except ValueError:
        return
    raise RunError(
        "a run through verl is on this Ray cluster, which holds one at a time: wait for its end, "
        "or start another cluster (engine.ray_address)"
    )


def _task_runner() -> Any:
    """verl's, in a process that knows our trainer."""
    import ray
    from verl.trainer.main_ppo import TaskRunnerV1

    base: Any = cast(Any, TaskRunnerV1).__ray_metadata__.modified_class

    class GraphTaskRunner(base):
        def run(self, config: Any) -> None:
            from graphpo_agent.engines.verl import trainer  # noqa: F401  (registers it)

            super().run(config)

    return ray.remote(GraphTaskRunner)


def cause_of(error: BaseException) -> BaseException:
    """What went wrong in another process, or the error itself."""
    while isinstance(inner := getattr(error, "cause", None), BaseException):
        error = inner
    return error


def _reason(error: Exception) -> GraphPOError:
    """What went wrong in a process of Ray's, as one line."""
    cause = cause_of(error)
    if isinstance(cause, GraphPOError):
        return cause
    where = ("full_key:", "object_type=", "For further information")  # hydra's and pydantic's last
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith(where)]
    said = lines[-1] if lines else type(error).__name__
    return RunError(f"a process of verl ended: {said} {SEE_LOG}")
