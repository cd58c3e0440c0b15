"""The Ray cluster: how this process comes to it, and the names of what we have there.

A named pool is nothing but its actors: builders that belong to no process, and a keeper (`ray_keeper.py`). Whoever
wants to know which builders there are asks the cluster for their names.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import socket
import threading
import uuid
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.dispatch.ray_builder import RayBuilder
from vlm_stream.errors import ConfigError, hide_secrets, require

if TYPE_CHECKING:
    from collections.abc import Callable

    from vlm_stream.loader_options import RayBuilders

logger = logging.getLogger(__name__)

NAMESPACE: Final = "vlm_stream"
"""Of the names of actors."""
_KNOCK_S: Final = 5.0
_LOOK_S: Final = 2.0
"""How often the cluster is asked for the builders of a named pool."""
CALLS: Final = 20_000
"""That a builder or a board answers at a time: each batch that waits is one, at a builder also each rank."""


def connect(options: RayBuilders) -> Any:
    """Return Ray, connected to the cluster; one that this process is connected to already is used.

    Raises:
        ConfigError: There is no cluster at that address, or this process is connected to another one.
        MissingExtraError: Ray is not installed.
    """
    ray = require("ray", "ray", "Building on a Ray cluster")
    if ray.is_initialized():
        _check_address(options.address, ray.get_runtime_context().gcs_address)
        return ray
    try:
        _knock(options.address)
        ray.init(
            address=options.address,
            namespace=NAMESPACE,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {options.address or 'RAY_ADDRESS'} ({error}), so no batch "
            f"can be built there; start one (ray start --head), correct builders.address, or leave builders out"
        ) from error
    return ray


def session(ray: Any) -> tuple[str, str] | None:
    """Return what tells this process's connection to a cluster from others, None where it has none.

    Without one no call of Ray's may be made: it would start a cluster in this process.
    """
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.gcs_address, context.get_job_id()


def say_error(error: BaseException | None) -> str:
    """Return an error of Ray in one line."""
    lines = hide_secrets(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def _split(address: str | None) -> tuple[str, int] | None:
    host, _, port = (address or "").rpartition(":")
    return (host, int(port)) if host and port.isdecimal() and "/" not in host else None


def _knock(address: str | None) -> None:
    """Raise an OSError where nobody listens at host:port: Ray would end this process after a minute."""
    if (place := _split(address)) is not None:
        socket.create_connection(place, timeout=_KNOCK_S).close()


def _check_address(address: str | None, here: str) -> None:
    place = _split(address)
    if place is None or address == here:
        return
    try:
        is_here = f"{socket.gethostbyname(place[0])}:{place[1]}" == here
    except OSError:
        is_here = False
    if not is_here:
        raise ConfigError(
            f"this process is connected to the Ray cluster at {here} and builders.address is {address}, so builders "
            f"would be started on the wrong one; leave builders.address out, or call ray.shutdown() first"
        )


def start_builder(ray: Any, options: RayBuilders, **more: Any) -> Any:
    """Start an actor and return its handle; it exists once Ray has found room for it.

    Its memory is one arena of glibc's: from any other, large blocks go back to the system when they are freed, whatever
    `keep_freed_memory` says, and the thread that builds is not the main one.
    """
    asked = options.runtime_env or {}
    actor = ray.remote(RayBuilder).options(
        num_cpus=options.num_cpus,
        resources=options.resources or None,
        runtime_env={**asked, "env_vars": {"MALLOC_ARENA_MAX": "1"} | asked.get("env_vars", {})},
        max_concurrency=CALLS,
        namespace=NAMESPACE,
        **more,
    )
    return actor.remote()


def keeper_name(pool: str) -> str:
    """Return the name of the actor that keeps a named pool."""
    return f"pool:{pool}"


def new_builder_name(options: RayBuilders) -> str:
    """Return a name for a builder of a named pool; it begins alike for those that ask the same of the cluster."""
    asked = repr((options.num_cpus, sorted((options.resources or {}).items()), options.runtime_env))
    return f"builder:{options.pool}:{hashlib.sha256(asked.encode()).hexdigest()[:8]}:{uuid.uuid4().hex[:12]}"


def builder_names(ray: Any, pool: str) -> list[str]:
    """Return the names of a named pool's builders, those too that are being started."""
    return [name for name in _names(ray) if name.rsplit(":", 2)[0] == f"builder:{pool}"]


def has_pool(ray: Any, pool: str) -> bool:
    """Tell whether anything of a named pool is there."""
    return keeper_name(pool) in _names(ray) or bool(builder_names(ray, pool))


def _names(ray: Any) -> list[str]:
    found = ray.util.list_named_actors(all_namespaces=True)
    return sorted(each["name"] for each in found if each["namespace"] == NAMESPACE)


def no_pool_error(pool: str) -> ConfigError:
    """Return what is said where there is no such pool."""
    return ConfigError(
        f"the cluster has no pool '{pool}', so there is nobody to build; start it: vlm-stream builders up --name "
        f"{pool} --count 8"
    )


def find_keeper(ray: Any, pool: str) -> Any:
    """Return the actor that keeps a named pool.

    Raises:
        ConfigError: There is none.
    """
    try:
        return ray.get_actor(keeper_name(pool), namespace=NAMESPACE)
    except ValueError as error:
        raise no_pool_error(pool) from error


class Guests:
    """Looks for the builders of a named pool, in a thread of its own: they come and go, and may be started again.

    One that was lost is new when it is found again.
    """

    def __init__(
        self, ray: Any, pool: str, found: Callable[[str, Any], None], is_connected: Callable[[], bool]
    ) -> None:
        """Begin to look; `found` is told the name and the handle of each builder.

        Raises:
            ConfigError: There is no such pool.
        """
        if not has_pool(ray, pool):
            raise no_pool_error(pool)
        self._ray, self._pool, self._found, self._is_connected = ray, pool, found, is_connected
        self._known: set[str] = set()
        """From when they are found until they are lost: whoever takes them in may be busy for long."""
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="vlm-stream-guests", daemon=True)
        self._thread.start()

    def lose(self, name: str) -> None:
        self._known.discard(name)

    def close(self) -> None:
        self._is_closed.set()

    def join(self) -> None:
        self._thread.join(_LOOK_S + 1)

    def _follow(self) -> None:
        said = ""
        while not self._is_closed.is_set() and self._is_connected():
            try:
                problem = self._look()
            except Exception as error:
                problem = f"cannot be asked for ({say_error(error)})"
            if problem and problem != said and self._is_connected():
                logger.warning(
                    "the pool '%s' %s, so this run waits for builders there; see: vlm-stream builders status --name %s",
                    self._pool,
                    problem,
                    self._pool,
                )
            said = problem
            self._is_closed.wait(_LOOK_S)

    def _look(self) -> str:
        names = builder_names(self._ray, self._pool)
        for name in set(names) - self._known:
            with contextlib.suppress(ValueError):  # it is gone
                actor = self._ray.get_actor(name, namespace=NAMESPACE)
                self._known.add(name)
                self._found(name, actor)
        return "" if names else "has no builders"
