"""Random requests get the answers that they get alone, whatever happens in the engine."""

from stress import engine_schedules
from tests.kernels.own_kernels import needs_own_kernels


@needs_own_kernels
def test_a_schedule_with_drafts_deaths_and_a_disk_changes_no_answer() -> None:
    said: list[str] = []
    engine_schedules.main(["-n", "1", "--first", "8", "--families", "mtp"], said.append)
    assert "tokens drafted" in said[0] and "deaths" in said[0]
