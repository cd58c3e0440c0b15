"""The builders of a named pool, as a run finds them: they come and go, and may be ended and started again.

Enters: the names that the cluster knows, time and again. Leaves: each builder that is new; one that was lost is new
when it is found again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.dispatch.ray_cluster import NAMESPACE, builder_names, has_pool, no_pool_error, say_error

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

_LOOK_S: Final = 2.0
"""How often the cluster is asked."""


class Guests:
    """Looks for the builders of a named pool, in a thread of its own."""

    def __init__(
        self, ray: Any, pool: str, found: Callable[[str, Any], None], is_connected: Callable[[], bool]
    ) -> None:
        """Begin to look.

        Args:
            ray: Connected.
            pool: Its name.
            found: Is told the name and the handle of each builder.
            is_connected: Whether this process is still in the cluster.

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
        """Note that a builder is lost."""
        self._known.discard(name)

    def close(self) -> None:
        """Look no more."""
        self._is_closed.set()

    def join(self) -> None:
        """Wait until that is so."""
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
