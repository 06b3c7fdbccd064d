"""What a stage reports of a request."""

from stretto.errors import Busy, Invalid
from stretto.messages.requests import Ended, Failed
from stretto.stage.request import Reason
from stretto.stage.timings import MAX_MARKS, StageTimings, failed
from stretto.types import RequestId

ID = RequestId("r")


def test_the_deadline_counts_from_the_first_output() -> None:
    timings = StageTimings(0.0)
    assert timings.deadline(0.5) is None
    for now in (1.0, 1.1, 1.9):
        timings.mark(now)
    assert timings.deadline(0.5) == 2.5


def test_marks_have_a_limit() -> None:
    timings = StageTimings(0.0)
    for i in range(MAX_MARKS + 5):
        timings.mark(float(i))
        timings.mark_chunk(float(i))
    assert len(timings.marks) == len(timings.chunks) == MAX_MARKS


def test_the_end_says_when_outputs_came() -> None:
    timings = StageTimings(1.0, cached=7)
    timings.mark(2.0)
    timings.mark_chunk(1.5)
    ended = timings.ended(ID, "writer", Reason.LENGTH)
    assert isinstance(ended, Ended)
    assert (ended.request, ended.stage, ended.reason) == (ID, "writer", "length")
    assert (ended.begun, ended.marks, ended.chunks, ended.cached) == (1.0, (2.0,), (1.5,), 7)


def test_a_failure_names_its_kind_and_the_field_that_is_wrong() -> None:
    assert failed(ID, "writer", Busy("full")) == Failed(ID, "writer", "Busy", "full", None)
    assert failed(ID, "writer", Invalid("no", "voice")).param == "voice"
