"""`headrace chat` on a real terminal, against real servers."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
from click.testing import CliRunner, Result

from headrace.cli.chat_files import message_of, read_attachment
from headrace.cli.chat_screen import place, recovery, told
from headrace.cli.chat_store import Conversation, Transcripts, words_of
from headrace.cli.main import cli
from headrace.client.events import Heartbeat, Progress, Queued
from headrace_common.errors import ConfigError
from tests.cli.terminal import terminal
from tests.client.builders import Given, cutting_proxy, listed_server
from tools.harness import processes, servers
from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server

GREEDY = ("-o", "temperature=0", "-o", "max_tokens=40", "-o", "ignore_eos=true")
ENDLESS = ("-o", "max_tokens=4000", "-o", "ignore_eos=true")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with running_server(str(folder), "--threads", "1", "--max-model-len", "8192") as running:
        yield running


def answer_of(url: str, messages: list[dict[str, str]]) -> str:
    body = {"messages": messages, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    return str(answer["choices"][0]["message"]["content"])


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def piped(words: tuple[str, ...], said: str, **variables: str) -> "Ended":
    ended = subprocess.run(
        [sys.executable, "-m", "headrace", "chat", *words],
        input=said.encode(),
        capture_output=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )
    return Ended(ended.returncode, ended.stdout.decode(), ended.stderr.decode())


def messages(state: Path, number: int = 1) -> list[dict[str, Any]]:
    """Messages of a conversation that is kept."""
    path = state / "headrace" / "chats" / f"{number}.json"
    found: list[dict[str, Any]] = json.loads(path.read_bytes())["messages"]
    return found


def asked(state: Path) -> list[str]:
    """The user's messages in the last conversation."""
    kept = messages(state)
    return [message["content"] for message in kept if message["role"] == "user"]


def num_running(server: ServerProcess) -> int:
    return int(httpx.get(f"{server.url}/manage/state").json()["running"])


def num_said(server: ServerProcess) -> int:
    """Tokens of the answer that runs; what the screen shows is drawn more than once."""
    rows = httpx.get(f"{server.url}/manage/state").json()["requests"]
    return max((int(row["tokens"]) for row in rows), default=0)


def test_what_is_piped_in_is_one_message_and_the_text_alone_comes_out(
    server: ServerProcess, tmp_path: Path
) -> None:
    shown = piped(("--url", server.url, *GREEDY), "hi\n", XDG_STATE_HOME=str(tmp_path))
    assert (shown.returncode, shown.stderr) == (0, "[cut off at the limit of tokens]\n")
    assert shown.stdout.rstrip("\n") == answer_of(
        server.url, [{"role": "user", "content": "hi"}]
    ).rstrip("\n")


def test_the_next_turn_knows_the_ones_before_and_a_later_chat_goes_on(
    server: ServerProcess, tmp_path: Path
) -> None:
    words = ("chat", "--url", server.url, "--system", "Be brief.", *GREEDY)
    with terminal(*words, XDG_STATE_HOME=str(tmp_path)) as shown:
        for said in ("hi", "again"):
            shown.wait_for("> ")
            shown.type(said)
        shown.wait_for("(?s)again.*> ")
        shown.press_ctrl_d()
        assert shown.wait_until_ended() == 0
    kept = messages(tmp_path)
    assert [message["role"] for message in kept] == ["system", *["user", "assistant"] * 2]
    assert kept[4]["content"] == answer_of(server.url, kept[:4])
    more = piped(("--url", server.url, "--continue", *GREEDY), "more", XDG_STATE_HOME=str(tmp_path))
    expected = answer_of(server.url, [*kept, {"role": "user", "content": "more"}])
    assert more.stdout.rstrip("\n") == expected.rstrip("\n")


def test_it_says_whom_one_talks_to_and_obeys_commands(
    server: ServerProcess, tmp_path: Path
) -> None:
    words = ("chat", "--url", f"{server.url}/v1", "--system", "Be brief.", *GREEDY)
    with terminal(*words, XDG_STATE_HOME=str(tmp_path)) as shown:
        greeting = shown.wait_for(r"for help\.\s+> ")
        assert re.search(r"tiny, context [\d,]+ tokens\. Type /help", greeting)
        for said, answer in (
            ("/help", "(?s)/new.*/again.*/exit.*> "),
            ("/hepl", r"(?s)\[/hepl is not a command.*> "),
            ("/again", r"(?s)\[there is no question yet\].*> "),
            ("/new x", r"(?s)\[/new takes no argument.*> "),
            ("/help me", r"(?s)\[/help takes no argument.*> "),
            ("one", "(?s)one.*> "),
            ("/new", r"(?s)\[new conversation\].*> "),
            ("two", "(?s)two.*> "),
            ("/again", "(?s)/again.*> "),
        ):
            shown.type(said)
            shown.wait_for(answer)
        shown.type("/exit")
        assert shown.wait_until_ended() == 0
    kept = messages(tmp_path, 2)
    assert [message["content"] for message in kept[:2]] == ["Be brief.", "two"]
    assert [message["role"] for message in kept] == ["system", "user", "assistant"]


def test_a_server_that_is_not_there_is_told_of_before_anything_is_typed(tmp_path: Path) -> None:
    with terminal("chat", "--url", "127.0.0.1:1", XDG_STATE_HOME=str(tmp_path)) as shown:
        assert "headrace serve" in shown.wait_for("with --port or --url")
        assert shown.wait_until_ended() == 1 and "> " not in shown.text


def test_ctrl_c_stops_the_answer_and_again_leaves(server: ServerProcess, tmp_path: Path) -> None:
    with terminal("chat", "--url", server.url, *ENDLESS, XDG_STATE_HOME=str(tmp_path)) as shown:
        shown.wait_for("> ")
        shown.type("hi")
        shown.wait_for("(?s)hi.{40}")
        shown.press_ctrl_c()
        shown.wait_for(r"(?s)\[stopped\].*> ")
        eventually(lambda: num_running(server) == 0)
        shown.press_ctrl_c()
        shown.wait_for(r"(?s)press Ctrl-C again.*> ")
        shown.press_ctrl_c()
        assert shown.wait_until_ended() == 130


def test_an_answer_that_is_cut_off_at_its_limit_is_followed_by_a_note(
    server: ServerProcess, tmp_path: Path
) -> None:
    words = ("chat", "--url", server.url, "-o", "max_tokens=3", "-o", "ignore_eos=true")
    with terminal(*words, XDG_STATE_HOME=str(tmp_path)) as shown:
        shown.wait_for("> ")
        shown.type("hi")
        shown.wait_for(r"(?s)\[cut off at the limit of tokens\].*> ")
        shown.press_ctrl_d()


def test_ctrl_c_clears_a_half_typed_line(server: ServerProcess, tmp_path: Path) -> None:
    with terminal("chat", "--url", server.url, XDG_STATE_HOME=str(tmp_path)) as shown:
        shown.wait_for("> ")
        shown.type_on("/hal")
        shown.wait_for("/hal")
        shown.press_ctrl_c()
        shown.wait_for("> ")
        shown.type("/help")
        shown.wait_for("(?s)/new.*/exit.*> ")
        shown.press_ctrl_c()
        shown.wait_for(r"(?s)press Ctrl-C again.*> ")
        shown.press_ctrl_c()
        assert shown.wait_until_ended() == 130


def test_lines_that_are_pasted_or_typed_are_one_message(
    server: ServerProcess, tmp_path: Path
) -> None:
    with terminal("chat", "--url", server.url, *GREEDY, XDG_STATE_HOME=str(tmp_path)) as shown:
        shown.wait_for("> ")
        shown.paste("one\n  two\nthree")
        shown.wait_for("three")
        shown.type("")
        shown.wait_for("> ")
        shown.type_on("one\\\rtwo\x1b\rthree\r")
        shown.wait_for("(?s)three.*> ")
        shown.press_ctrl_d()
        assert shown.wait_until_ended() == 0
    assert asked(tmp_path) == ["one\n  two\nthree", "one\ntwo\nthree"]


def test_a_terminal_that_is_dumb_takes_lines_too(server: ServerProcess, tmp_path: Path) -> None:
    words = ("chat", "--url", server.url, *GREEDY)
    with terminal(*words, XDG_STATE_HOME=str(tmp_path), TERM="dumb") as shown:
        shown.wait_for("> ")
        shown.type("one\\")
        shown.type("two")
        shown.wait_for("(?s)two.*> ")
        shown.press_ctrl_d()
        assert shown.wait_until_ended() == 0
    assert asked(tmp_path) == ["one\ntwo"] and "\x1b[" not in shown.raw


def test_keys_pressed_during_an_answer_wait_for_the_next_prompt(
    server: ServerProcess, tmp_path: Path
) -> None:
    words = ("chat", "--url", server.url, "-o", "max_tokens=300", "-o", "ignore_eos=true")
    with terminal(*words, XDG_STATE_HOME=str(tmp_path)) as shown:
        shown.wait_for("> ")
        shown.type("hi")
        shown.wait_for("(?s)hi.{20}")
        shown.type_on("/typed ")
        shown.paste("before\nits prompt")
        answer = shown.wait_for("> ")
        assert "typed" not in answer and "before" not in answer
        shown.wait_for(r"(?s)/typed before.*its prompt")
        shown.press_ctrl_c()
        shown.wait_for("> ")
    assert asked(tmp_path) == ["hi"]


def test_the_terminal_is_left_as_it_was(server: ServerProcess, tmp_path: Path) -> None:
    with terminal("chat", "--url", server.url, XDG_STATE_HOME=str(tmp_path)) as shown:
        before = shown.modes()
        shown.wait_for("> ")
        shown.press_ctrl_d()
        assert shown.wait_until_ended() == 0 and shown.modes() == before
    assert shown.raw.rindex("\x1b[?2004l") > shown.raw.rindex("\x1b[?2004h")


def test_a_message_that_is_refused_does_not_end_the_chat(
    server: ServerProcess, tmp_path: Path
) -> None:
    words = ("chat", "--url", server.url, "-o", "model=another")
    with terminal(*words, XDG_STATE_HOME=str(tmp_path)) as shown:
        shown.wait_for("> ")
        shown.type("hi")
        shown.wait_for(r"(?s)\[.*another.*\].*> hi")  # to be mended
        shown.press_ctrl_c()
        shown.wait_for("> ")
        shown.press_ctrl_d()
        assert shown.wait_until_ended() == 0


def test_cut_connections_show_no_text_twice_and_lose_none(
    server: ServerProcess, tmp_path: Path
) -> None:
    port = int(server.url.rpartition(":")[2])
    with cutting_proxy(port, cut_after=1500) as proxy:
        shown = piped(("--url", proxy.url, *GREEDY), "hi", XDG_STATE_HOME=str(tmp_path))
        assert proxy.num_connections > 2
    assert shown.stdout.rstrip("\n") == answer_of(
        server.url, [{"role": "user", "content": "hi"}]
    ).rstrip("\n")


def test_a_long_prompt_shows_its_progress(server: ServerProcess, tmp_path: Path) -> None:
    with terminal("chat", "--url", server.url, *GREEDY, XDG_STATE_HOME=str(tmp_path)) as shown:
        shown.wait_for("> ")
        shown.type("word " * 300)
        assert "tokens" in shown.wait_for(r"processing the prompt.*of [\d,]+ tokens")


def test_with_a_model_it_has_a_server_of_its_own_that_ends_with_it(
    folder: Path, tmp_path: Path
) -> None:
    words = ("chat", str(folder), *GREEDY)
    with terminal(*words, XDG_STATE_HOME=str(tmp_path), HEADRACE_THREADS="1") as shown:
        shown.wait_for("> ")
        children = processes.children(shown.process.pid)
        assert children
        shown.press_ctrl_c()
        shown.wait_for(r"(?s)press Ctrl-C again.*> ")
        shown.press_ctrl_c()
        assert shown.wait_until_ended() == 130
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_an_answer_goes_on_after_its_engine_was_killed(
    server: ServerProcess, tmp_path: Path
) -> None:
    field = ("-o", "temperature=0", "-o", "ignore_eos=true", "-o", "max_tokens=6000")
    with terminal("chat", "--url", server.url, *field, XDG_STATE_HOME=str(tmp_path)) as shown:
        shown.wait_for("> ")
        shown.type("hi")
        shown.wait_for("(?s)hi.{20}")
        subprocess.run(["pkill", "-KILL", "-P", str(server.process.pid)], check=True)
        eventually(lambda: num_running(server) == 0)
        eventually(lambda: num_running(server) == 1)  # by the next engine
        before = num_said(server)
        eventually(lambda: shown.read() and num_said(server) > before + 300, within_s=60)
        shown.press_ctrl_c()
        shown.wait_for(r"(?s)\[stopped\].*> ")
    said = messages(tmp_path)[-1]["content"]
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 6000}
    whole = httpx.post(
        f"{server.url}/v1/chat/completions", json={**body, "ignore_eos": True}, timeout=100
    ).json()["choices"][0]["message"]["content"]
    assert len(said) > 100 and whole.startswith(said)


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (("--url", "127.0.0.1:1/v1"), 1, "No server answers (127.0.0.1:1: Connection refused)"),
        (("--url", "http:/oops"), 2, "is not a server's address"),
        (("tiny", "--url", "http://127.0.0.1:1"), 2, "use only one of the two"),
        (("--continue",), 2, "no conversation to continue"),
        (("--resume", "3"), 2, "There is no conversation 3; /list or --list shows them"),
        (("-o", "temprature=1"), 2, "did you mean temperature?"),
        (("/nowhere/at/all",), 3, "No model folder '/nowhere/at/all'"),
    ],
)
def test_what_cannot_work_is_one_line_and_its_exit_code(
    words: tuple[str, ...], code: int, line: str, tmp_path: Path
) -> None:
    ended = piped(words, "hi", XDG_STATE_HOME=str(tmp_path))
    assert ended.returncode == code
    assert line in ended.stderr and len(servers.said(ended.stderr)) == 1, ended.stderr


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_an_end_by_signal_takes_the_private_server_with_it(
    number: int, folder: Path, tmp_path: Path
) -> None:
    with terminal("chat", str(folder), XDG_STATE_HOME=str(tmp_path)) as shown:
        shown.wait_for("> ")
        children = processes.children(shown.process.pid)
        shown.signal(number)
        assert shown.wait_until_ended() in (128 + number, -number)
    eventually(lambda: not any(Path(f"/proc/{child}").exists() for child in children))


def test_words_of_waiting() -> None:
    progress = Progress(
        seq=1, at_ms=0, choice=0, total=2000, cache=500, processed=1000, time_ms=250
    )
    assert told(progress) == "1,000 of 2,000 tokens, 25 % cached, 2,000 tokens/s"
    slow = msgspec.structs.replace(progress, processed=600, time_ms=5000)
    assert told(slow) == "600 of 2,000 tokens, 25 % cached, 20 tokens/s, 1 min 10 s left"
    queued = Queued(seq=1, at_ms=0, position=2, waiting=3, eta_ms=64_200)
    assert place(queued) == "waiting: position 2 of 3 in the queue, about 1 min 4 s"
    assert recovery(Heartbeat("recovering", 1)).startswith("the engine is restarting;")
    assert "restarting (attempt 2);" in recovery(Heartbeat("recovering", 2))


def test_ctrl_c_at_an_answer_keeps_what_was_typed_during_it(
    server: ServerProcess, tmp_path: Path
) -> None:
    with terminal("chat", "--url", server.url, *ENDLESS, XDG_STATE_HOME=str(tmp_path)) as shown:
        shown.wait_for("> ")
        shown.type("hi")
        shown.wait_for("(?s)hi.{40}")
        shown.type_on("/typed early")
        shown.type_on("\x03")  # the key, which may throw away what waits
        shown.wait_for(r"(?s)\[stopped\].*> /typed early")
        shown.press_ctrl_c()
        shown.wait_for("> ")


def test_a_question_that_no_server_took_is_there_again(tmp_path: Path) -> None:
    with listed_server(Given(body=b'{"data": [{"id": "tiny"}]}')) as gone:
        words = ("chat", "--url", gone.url, *GREEDY)
        with terminal(*words, XDG_STATE_HOME=str(tmp_path)) as shown:
            shown.wait_for("> ")
            gone.shutdown()
            gone.server_close()
            shown.type("hi there")
            shown.wait_for(r"(?s)\[No server answers.*\].*> hi there")
    assert not (tmp_path / "headrace" / "chats").exists()


def test_files_go_along_with_a_message(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("one\n```\ntwo\n```\n")
    (tmp_path / "dot.png").write_bytes(b"\x89PNG\r\n and so on")
    (tmp_path / "odd").write_bytes(b"\xff\x00")
    with terminal("chat", "--url", server.url, *GREEDY, XDG_STATE_HOME=str(tmp_path)) as shown:
        shown.wait_for("> ")
        for said, answer in (
            (f"/file {tmp_path}/none", "cannot be read: No such file"),
            (f"/file {tmp_path}/odd", "neither text in UTF-8 nor an image"),
            (f"/file {tmp_path}/dot.png", "is an image, but this model accepts text only"),
            (f"/file {tmp_path}/notes.md", "attached to the next message: notes.md, 16 characters"),
            ("what is it?", "it.*"),
        ):
            shown.type(said)
            shown.wait_for(f"(?s){answer}.*> ")
        shown.press_ctrl_d()
        assert shown.wait_until_ended() == 0
    (question,) = asked(tmp_path)
    assert question == "notes.md:\n````md\none\n```\ntwo\n```\n````\n\nwhat is it?"


def test_images_are_parts_of_a_message(tmp_path: Path) -> None:
    (tmp_path / "dot.png").write_bytes(b"\x89PNG\r\n and so on")
    attachment = read_attachment(str(tmp_path / "dot.png"), sees=True)
    message = message_of("what is it?", [attachment])
    picture, text = message["content"]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert text == {"type": "text", "text": "what is it?"}
    assert words_of(message) == "[image]\nwhat is it?"


def test_conversations_are_listed_and_gone_on_with(server: ServerProcess, tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path)}
    for text in ("first of all", "second"):
        assert piped(("--url", server.url, *GREEDY), text, **state).returncode == 0
    shown = piped(("--list",), "", **state)
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["1", "2"]
    assert "1 asked  first of all" in shown.stdout
    words = ("--url", server.url, "--resume", "1", *GREEDY)
    assert piped(words, "third", **state).returncode == 0
    assert asked(tmp_path) == ["first of all", "third"]
    with terminal("chat", "--url", server.url, *GREEDY, **state) as chat:
        chat.wait_for("> ")
        chat.type("/list")
        chat.wait_for("(?s)2 asked  first of all.*> ")
        chat.type("/open 2")
        chat.wait_for("(?s)> second.*> ")
        chat.type("/open two")
        chat.wait_for("(?s)needs the number.*> ")
        chat.type("fourth")
        chat.wait_for("(?s)fourth.*> ")
        chat.press_ctrl_d()
        chat.wait_until_ended()
    assert [m["content"] for m in messages(tmp_path, 2) if m["role"] == "user"] == [
        "second",
        "fourth",
    ]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"messages": [{"role": "user"}]}', '{"messages": [1]}']
)
def test_a_kept_conversation_that_is_damaged_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "1.json").write_text(text)
    with pytest.raises(ConfigError, match=r"1\.json is damaged"):
        Transcripts(tmp_path).read()
    assert [it.title for it in Transcripts(tmp_path).listed()] == ["damaged"]


def test_a_kept_conversation_is_its_users_alone(tmp_path: Path) -> None:
    kept = Transcripts(tmp_path / "chats")
    kept.write(Conversation([{"role": "user", "content": "hi"}]))
    assert kept.read().messages == [{"role": "user", "content": "hi"}]
    assert (tmp_path / "chats" / "1.json").stat().st_mode & 0o777 == 0o600


def test_the_conversation_of_an_older_version_is_the_first(tmp_path: Path) -> None:
    (tmp_path / "chat.json").write_text('{"messages": [{"role": "user", "content": "hi"}]}')
    for _ in range(2):
        assert Transcripts(tmp_path / "chats").read(1).messages[0]["content"] == "hi"
    assert not (tmp_path / "chat.json").exists()


def test_an_empty_stdin_is_an_error_that_says_how_to_chat(tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path)}
    for words in (["chat"], ["chat", "headrace-mini"]):
        fault = CliRunner().invoke(cli, words, "\n", env=state).exception
        assert isinstance(fault, ConfigError) and "echo Hello | headrace chat" in str(fault)


def test_stored_conversations_are_deleted_by_number_or_all(tmp_path: Path) -> None:
    def delete(*names: str) -> Result:
        words = [word for name in names for word in ("--delete", name)]
        return CliRunner().invoke(cli, ["chat", *words], env={"XDG_STATE_HOME": str(tmp_path)})

    kept = Transcripts(tmp_path / "headrace" / "chats")
    for _ in range(4):
        kept.write(Conversation([{"role": "user", "content": "hi"}]))
    assert delete("2").output == "Deleted conversation 2.\n" and kept.numbers() == [1, 3, 4]
    for wrong in ("2", "two", "-1"):
        assert isinstance(delete("4", wrong).exception, ConfigError), wrong
    assert kept.numbers() == [1, 3, 4]
    assert delete("all").output.count("Deleted conversation") == 3 and kept.numbers() == []
    assert delete("all").output == "No conversation is stored.\n"
