"""What runs next in an autoregressive stage. Pure Python: nothing below this package imports
torch."""

from stretto.stage.scheduler.batch import Batch, Outcome, Published, RowJoin, RowSpan, StepResult
from stretto.stage.scheduler.blocks import BlockPool
from stretto.stage.scheduler.config import SchedulerConfig
from stretto.stage.scheduler.prefix import prefix_keys
from stretto.stage.scheduler.scheduler import Scheduler

__all__ = [
    "Batch",
    "BlockPool",
    "Outcome",
    "Published",
    "RowJoin",
    "RowSpan",
    "Scheduler",
    "SchedulerConfig",
    "StepResult",
    "prefix_keys",
]
