"""The server under measurement: its model, and completions with the time of every token."""

import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec

from headrace_common.system.loopback import is_loopback

_SSE = "data: "
_CONNECT_S = 10.0


class ServerSaid(Exception):
    """The server answered with an error, or not as expected."""


class Target:
    """A server. Prompts have the cache salt `salt`, so earlier runs did not cache them."""

    def __init__(self, url: str, api_key: str, salt: str) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = url.rstrip("/")
        self.model = ""
        self.num_vocab = 0
        self.max_model_len = 0
        limits = httpx.Limits(max_connections=None)
        is_local = is_loopback(httpx.URL(url).host)
        self.http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=limits,
            # With a transport, httpx uses no proxy of the environment.
            transport=httpx.AsyncHTTPTransport(limits=limits) if is_local else None,
        )
        self._salt = salt

    async def learn_model(self) -> None:
        """Fetch the model's name, vocabulary size and maximum length."""
        response = await self.http.get("/v1/models", timeout=_CONNECT_S)
        models = _object(response.content).get("data")
        if response.status_code != 200 or not models:
            raise ServerSaid(
                _refusal(response) if response.is_error else "The server lists no models."
            )
        model = models[0]
        meta = model.get("meta") or {}
        self.model = model["id"]
        self.num_vocab = meta.get("n_vocab") or 32000
        self.max_model_len = model.get("max_model_len") or meta.get("n_ctx_train") or 4096

    async def tokens(self, prompt: list[int], max_tokens: int) -> AsyncIterator[float]:
        """Yield the arrival time of each token, from time.perf_counter.

        The request asks for log probabilities, so that a token without text gets a frame too.
        """
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "heartbeat": False,
            "logprobs": 0,
            "cache_salt": self._salt,
        }
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise ServerSaid(_refusal(response))
            async for line in response.aiter_lines():
                now = time.perf_counter()
                for _ in range(_num_tokens(line)):
                    yield now

    async def ingestion(self, prompt: list[int]) -> dict[str, Any] | None:
        """Return the server's report on how it processed this prompt; None if there is none."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "cache_salt": self._salt}
        body["return_ingestion"] = True
        response = await self.http.post("/v1/completions", json=body)
        if response.status_code != 200:
            return None
        told: dict[str, Any] | None = response.json().get("headrace", {}).get("ingestion")
        return told

    async def first_token(self, prompt: list[int]) -> float:
        """Return the arrival time of the first token."""
        first: float | None = None
        async for at in self.tokens(prompt, 1):
            first = first or at
        if first is None:
            raise ServerSaid("An answer ended without a token.")
        return first


def _refusal(response: httpx.Response) -> str:
    message = _message(_object(response.content))
    return message or f"{response.url} answered with the status {response.status_code}."


def _message(body: dict[str, Any]) -> str | None:
    error = body.get("error")
    return error.get("message") if isinstance(error, dict) else error


def _object(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (ValueError, RecursionError):
        raise ServerSaid("The answer is not JSON. Is this the address of an LLM server?") from None


def _num_tokens(line: str) -> int:
    if not line.startswith(_SSE + "{"):
        return 0
    frame: dict[str, Any] = msgspec.json.decode(line[len(_SSE) :])
    if "error" in frame:
        raise ServerSaid(_message(frame) or "An answer ended with an error.")
    choices = frame.get("choices")
    if not choices:
        return 0
    logprobs = choices[0].get("logprobs")
    if logprobs and logprobs.get("tokens"):
        return len(logprobs["tokens"])
    return int(bool(choices[0].get("text")))
