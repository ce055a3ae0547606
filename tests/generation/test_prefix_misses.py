from array import array
from typing import Any

import msgspec

from headrace.generation.prefix_misses import PrefixMisses
from tests.gateway.builders import FakeModel, make_record, make_request

TEXT = "x" * 1000


def follow(trail: PrefixMisses, text: str, owner: str = "", **changes: Any) -> dict[str, Any]:
    record = make_record(make_request(**changes))
    names = msgspec.structs.replace(record.names, owner=owner)
    ids = array("i", list(text.encode())).tobytes()
    record = msgspec.structs.replace(record, prompts=(ids,), names=names)
    return trail.follow(record, FakeModel())  # type: ignore[arg-type]


def test_a_prefix_miss_reports_its_position_and_the_differing_text() -> None:
    trail = PrefixMisses(shows_text=True)
    assert not follow(trail, f"{TEXT}<total_tokens>976141{TEXT}")
    told = follow(trail, f"{TEXT}<total_tokens>912000{TEXT}")
    assert told == {"shared_tokens": 1015, "differs_from_there": "12000xxxxxxx"}
    assert follow(PrefixMisses(False), TEXT) == {}


def test_the_differing_text_is_only_reported_if_configured() -> None:
    trail = PrefixMisses(shows_text=False)
    follow(trail, f"{TEXT}a{TEXT}")
    assert follow(trail, f"{TEXT}b{TEXT}") == {"shared_tokens": 1000}


def test_a_continued_conversation_reports_no_prefix_miss() -> None:
    trail = PrefixMisses(True)
    for text in (TEXT, f"{TEXT}and on", f"{TEXT}and so on", "short", "shorter"):
        assert not follow(trail, text)


def test_a_prompt_is_compared_with_its_owners_most_similar_one() -> None:
    trail = PrefixMisses(False)
    follow(trail, f"{TEXT}a{TEXT}", "ann")
    for other in (
        {"owner": "bob"},
        {"owner": "ann", "cache_salt": "s"},
        {"owner": "ann", "model": "m"},
    ):
        assert not follow(trail, f"{TEXT}b{TEXT}", **other)
    follow(trail, f"{TEXT[:300]}c{TEXT}", "ann")  # another conversation with the same begin
    assert follow(trail, f"{TEXT}a{TEXT[:500]}d", "ann") == {"shared_tokens": 1501}


def test_a_prompt_sent_without_caching_is_not_remembered() -> None:
    trail = PrefixMisses(False)
    follow(trail, f"{TEXT}a{TEXT}", cache_prompt=False)
    assert not follow(trail, f"{TEXT}b{TEXT}")


def test_only_the_latest_prompts_are_remembered() -> None:
    trail = PrefixMisses(False)
    for number in range(40):
        follow(trail, f"{number:03}{TEXT}a{TEXT}")
    assert not follow(trail, f"000{TEXT}b{TEXT}")
    assert follow(trail, f"039{TEXT}b{TEXT}")
