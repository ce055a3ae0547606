"""The blocking client is the asynchronous one, rewritten."""

from tools.make_sync_client import FOLDER, written


def test_the_blocking_client_is_as_it_is_written() -> None:
    found = (FOLDER / "client.py").read_text()
    assert found == written(), "run: python -m tools.make_sync_client"
