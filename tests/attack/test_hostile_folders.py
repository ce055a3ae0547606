"""Tests that a server survives hostile model folders; FOLDERS sets their number."""

import asyncio
import os
from pathlib import Path

import pytest

from stress.attack.hostile import Folders, read_folders
from stress.attack.target import Target
from stress.attack.watched import watched_server
from stress.site import Site

NUM_FOLDERS = int(os.environ.get("FOLDERS", "30"))


@pytest.mark.timeout(600)
def test_each_hostile_folder_gets_an_error_or_a_valid_answer(tmp_path: Path) -> None:
    problems: list[str] = []
    target = Target(Site("unused", tmp_path), "corpus", tmp_path, 0, problems.append)
    made = Folders(tmp_path, "corpus", NUM_FOLDERS)

    async def run() -> int:
        async with watched_server(target, tmp_path, *made.flags) as watched:
            spoiled = await asyncio.to_thread(made.spoil)
            return await read_folders(watched, spoiled)

    survived = asyncio.run(run())
    print(survived, target.statuses, target.notes)
    assert not problems, "\n".join(problems)
    assert survived == NUM_FOLDERS
