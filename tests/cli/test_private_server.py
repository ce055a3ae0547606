"""A private server's settings, whatever other servers are told."""

import socket

from headrace.cli.listener import address_of
from headrace.cli.private_server import own_environment
from headrace_common.config.sources import load


def test_settings_of_other_servers_do_not_reach_a_private_one() -> None:
    variables = {
        "HEADRACE_HOST": "::1",
        "HEADRACE_LOG_FORMAT": "json",
        "HEADRACE_SSL_CERTFILE": "a.pem",
        "HEADRACE_SSL_KEYFILE": "b.pem",
        "HEADRACE_MAX_MODEL_LEN": "512",
    }
    config = load({"model": "tiny"}, own_environment(variables), None)
    assert (config.http.host, config.http.ssl_certfile) == ("127.0.0.1", None)
    assert (config.log_format, config.models[0].max_model_len) == ("text", 512)


def test_prefixes_stay_off_the_disk_if_the_state_does() -> None:
    for variables, folder in (
        ({}, None),
        ({"HEADRACE_STATE_DIR": "none"}, "none"),
        ({"HEADRACE_STATE_DIR": "none", "HEADRACE_PREFIX_CACHE_DIR": "auto"}, "auto"),
    ):
        config = load({"model": "tiny", "state_dir": "x"}, own_environment(variables), None)
        assert config.models[0].prefix_cache.prefix_cache_dir == folder


def test_the_address_of_a_server_is_one_of_a_url() -> None:
    for host, shown in (("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as listener:
            try:
                listener.bind((host, 0))
            except OSError:  # a machine without this family
                continue
            assert address_of(listener) == f"{shown}:{listener.getsockname()[1]}"
