"""Processes that end with the one that started them."""

from __future__ import annotations

import os

from stretto._process import die_with_parent


def test_a_child_that_asks_too_late_ends_by_itself() -> None:
    """Its parent may have died between the fork and the asking: then the kernel would never tell
    it."""
    for parent, status in ((os.getpid(), 0), (os.getpid() + 1, 1)):
        child = os.fork()
        if child == 0:
            die_with_parent(parent)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
