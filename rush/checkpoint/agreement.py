"""What the ranks tell each other about a save, through the store where they met: the thread that writes uses no collective."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rush.parallel import Ranks
from rush.parallel.ranks import remote_error

ASK_AGAIN_S = 0.02
"""Between two looks at the store. A blocking wait there would keep the training from using it."""
HEARD_LIMIT_S = 60.0


@dataclass
class Meeting:
    """What the ranks tell each other about one save, through the store; waiting ends when the save is abandoned."""

    ranks: Ranks
    number: int
    go_on: Callable[[], None]

    def say(self, what: str, make: Callable[[], str]) -> str:
        """What rank 0 makes, or why it could not, told to all."""
        assert self.ranks.store is not None
        try:
            made = make()
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # the store may have gone with the run
                self._tell(what, failure(error))
            raise
        self._tell(what, {"value": made})
        return made

    def _tell(self, what: str, told: Mapping[str, str]) -> None:
        """Say it. What is said last, stay until all have heard it: where rank 0 keeps the store, that goes with it."""
        assert self.ranks.store is not None
        self.ranks.store.set(self._key(what), json.dumps(told))
        if what == "begun" and "error" not in told:
            return
        limit = time.monotonic() + HEARD_LIMIT_S
        while self.ranks.store.add(self._key(f"{what}/heard"), 0) < self.ranks.world - 1:
            self.go_on()
            if time.monotonic() > limit:
                return  # they have gone, or will ask later
            time.sleep(ASK_AGAIN_S)

    def hear(self, what: str) -> str:
        """What rank 0 made, or its error; and tell it that this was heard, so that it may leave."""
        told = self._heard(what)
        assert self.ranks.store is not None
        self.ranks.store.add(self._key(f"{what}/heard"), 1)
        if "error" in told:
            raise remote_error(told["error"], told["says"])
        value: str = told["value"]
        return value

    def say_part(self, part: Mapping[str, Any]) -> None:
        assert self.ranks.store is not None
        self.ranks.store.set(self._key(f"part/{self.ranks.rank}"), json.dumps(part))

    def hear_parts(self) -> list[dict[str, Any]]:
        """What all other ranks wrote; the first that failed is an error here, and by `sealed` everywhere."""
        assert self.ranks.store is not None
        found = []
        for rank in range(1, self.ranks.world):
            part = self._heard(f"part/{rank}")
            self.ranks.store.delete_key(self._key(f"part/{rank}"))
            if "error" in part:
                raise remote_error(part["error"], f"rank {rank}: {part['says']}")
            found.append(part)
        return found

    def _heard(self, what: str) -> dict[str, Any]:
        assert self.ranks.store is not None
        while not self.ranks.store.check([self._key(what)]):
            self.go_on()
            time.sleep(ASK_AGAIN_S)
        told: dict[str, Any] = json.loads(self.ranks.store.get(self._key(what)))
        return told

    def _key(self, what: str) -> str:
        return f"save/{self.number}/{what}"


def failure(error: BaseException) -> dict[str, str]:
    return {"error": type(error).__name__, "says": str(error)}
