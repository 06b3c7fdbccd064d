"""What runs next in an autoregressive stage. Pure Python: nothing below this package imports torch."""

from stretto.stage.scheduler.batch import Batch, Leave, Outcome, Published, RowJoin, RowLeave, RowSpan, StepResult
from stretto.stage.scheduler.blocks import BlockPool, PayloadHandle, prefix_key
from stretto.stage.scheduler.config import SchedulerConfig
from stretto.stage.scheduler.scheduler import Scheduler

__all__ = [
    "Batch",
    "BlockPool",
    "Leave",
    "Outcome",
    "PayloadHandle",
    "Published",
    "RowJoin",
    "RowLeave",
    "RowSpan",
    "Scheduler",
    "SchedulerConfig",
    "StepResult",
    "prefix_key",
]
