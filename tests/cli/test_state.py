"""Where the command stores streams, chats and cached prefixes."""

import pytest

from headrace.cli.state import with_prefix_cache
from headrace_common.config.settings import (
    ModelConfig,
    PrefixCacheConfig,
    ServerConfig,
    StreamConfig,
)


@pytest.mark.parametrize(
    ("given", "state_dir", "cluster", "expected"),
    [
        (None, None, None, "auto"),
        (None, "/streams", None, "auto"),
        (None, "redis://cache:6379/0", None, "auto"),
        (None, "none", None, None),
        (None, None, "auto", None),
        ("none", None, None, "none"),
        ("/prefixes", "none", "auto", "/prefixes"),
    ],
)
def test_prefixes_are_stored_where_streams_are_unless_the_user_says_otherwise(
    given: str | None, state_dir: str | None, cluster: str | None, expected: str | None
) -> None:
    model = ModelConfig(prefix_cache=PrefixCacheConfig(prefix_cache_dir=given))
    config = ServerConfig(streams=StreamConfig(state_dir=state_dir), cluster=cluster)
    assert with_prefix_cache(model, config).prefix_cache.prefix_cache_dir == expected
