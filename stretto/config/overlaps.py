"""Switches that turn off one overlap each. Tests use them as oracles (the output is the same),
benches as ablations."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.config.setting import tuning


@dataclass(frozen=True, slots=True)
class OverlapSwitches:
    """All are on by default."""

    async_d2h: bool = tuning(True, "off: a step's payload is on the host before the loop goes on")
    async_h2d: bool = tuning(True, "off: a stage gets a chunk only when it is on the device")
    payload_stream: bool = tuning(True, "off: payloads are copied behind the step, on its stream")
    zero_copy_encode: bool = tuning(
        True, "off: chunks are encoded into bytes, which are then copied"
    )
    just_in_time: bool = tuning(
        True, "off: a step is launched as soon as there is room, even if the device has work"
    )
    prefill_priority: bool = tuning(
        True,
        "off: speech is decoded beside prefill, even if all listeners have enough buffered",
        old_name="give_way",
    )
