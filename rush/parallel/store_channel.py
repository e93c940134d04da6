"""Messages between ranks through the store: JSON values or errors under a key, with acknowledgements.

Nothing here uses a device or a collective, so waiting has no collective's time limit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from rush import errors

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PATIENCE = timedelta(days=2)
"""Limit of a blocking wait: rank 0 may prepare data for hours."""
POLL_S = 0.02
ACKNOWLEDGE_S = 60.0
FROM_RANK_0 = "reported by rank 0"
"""Note on an error that rank 0 reports for all ranks."""

T = TypeVar("T")


@dataclass(frozen=True)
class StoreChannel:
    """Messages under one prefix of the store."""

    store: Store
    prefix: str
    check: Callable[[], None] | None = None
    """Called between polls; raises to stop waiting. None waits in one blocking call, which other threads of this process
    must not need the store beside."""
    limit: timedelta = PATIENCE

    def send(self, key: str, value: Any) -> None:
        self.store.set(self._key(key), json.dumps({"value": value}))

    def send_error(self, key: str, error: BaseException) -> None:
        self.store.set(self._key(key), json.dumps({"error": type(error).__name__, "message": str(error)}))

    def publish(
        self, key: str, make: Callable[[], T], *, receivers: int = 0, wait_for_errors_only: bool = False
    ) -> T:
        """Send what `make` returns, or the error it raises, and wait until the receivers have acknowledged it."""
        try:
            value = make()
        except BaseException as error:
            with suppress(RuntimeError):  # the store may be gone
                self.send_error(key, error)
                self.wait_acknowledged(key, receivers)
            raise
        self.send(key, value)
        if not wait_for_errors_only:
            self.wait_acknowledged(key, receivers)
        return value

    def receive(self, key: str, *, acknowledge: bool = False, sender: str = "") -> Any:
        """The value under the key, once it is there; an error that was sent is raised."""
        self._wait(self._key(key))
        message: dict[str, Any] = json.loads(self.store.get(self._key(key)))
        if acknowledge:
            self.acknowledge(key)
        if "error" in message:
            raise remote_error(message["error"], sender + message["message"])
        return message["value"]

    def acknowledge(self, key: str) -> None:
        self.store.add(self._key(f"{key}/acknowledged"), 1)

    def wait_acknowledged(self, key: str, receivers: int, limit_s: float = ACKNOWLEDGE_S) -> None:
        """Stay until all receivers have read the message: rank 0 may host the store, which ends with it."""
        deadline = time.monotonic() + limit_s
        while (
            receivers
            and self.store.add(self._key(f"{key}/acknowledged"), 0) < receivers
            and time.monotonic() < deadline
        ):
            if self.check is not None:
                self.check()
            time.sleep(POLL_S)

    def delete(self, key: str) -> None:
        self.store.delete_key(self._key(key))

    def _wait(self, key: str) -> None:
        if self.check is None:
            self.store.wait([key], self.limit)
            return
        while not self.store.check([key]):
            self.check()
            time.sleep(POLL_S)

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}"


def remote_error(name: str, text: str) -> Exception:
    """An error of another rank, to be raised here too."""
    kind = getattr(errors, name, None)
    ours = isinstance(kind, type) and issubclass(kind, errors.RushError)
    error: Exception = kind(text) if ours else RuntimeError(f"rank 0 ended with {name}: {text}")  # type: ignore[misc]
    error.add_note(FROM_RANK_0)
    return error
