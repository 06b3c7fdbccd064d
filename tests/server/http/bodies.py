"""Bodies that come in turns."""

from __future__ import annotations

import asyncio


class Turned(asyncio.SelectorEventLoop):
    """A loop whose clock the test turns on."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead
