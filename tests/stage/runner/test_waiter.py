"""The thread that wakes the loop when the device has finished something."""

from stretto.stage.runner.waiter import Waiter


def test_the_waiter_notes_the_end_before_it_wakes_the_loop() -> None:
    """Or the loop would take the time at which it looked for the time at which the step ended."""
    log: list[str] = []

    class Event:
        def synchronize(self) -> None:
            log.append("fired")

    waiter = Waiter(lambda: log.append("woken"), "test")
    waiter.watch(Event(), lambda: log.append("noted"))  # type: ignore[arg-type]
    waiter.watch(Event())  # type: ignore[arg-type]
    waiter.close()
    assert log == ["fired", "noted", "woken", "fired", "woken"]
