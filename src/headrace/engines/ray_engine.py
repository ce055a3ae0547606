"""An engine on some node of a Ray cluster: an EngineClient whose engine is an actor's.

Ray is imported when the first one is made, and never without `--cluster`. The actor is owned by
this process and ends with it: all that an engine knows can be told to another one anew, and an
engine that nobody hears would only hold memory.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import time
from typing import Any

import msgspec

from headrace.engines.backoff import Backoff
from headrace.engines.client import EngineDown, NewsQueue
from headrace.engines.ray_actor import (
    Down,
    EngineActor,
    Failed,
    Sent,
    ToEngine,
    Up,
    encode,
    news_of,
)
from headrace.engines.supervisor import MAX_FAILED_STARTS
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import ConfigError
from headrace_common.messages import Cancel, DropAdapter, LoadAdapter, Submit
from headrace_common.version import __version__

logger = logging.getLogger(__name__)

NAMESPACE = "headrace"
_SILENT_S = 15.0  # without an answer, an actor that has answered before counts as dead
_CLOSE_S = 5.0
_WAIT_TOLD_S = 15.0  # without a node, until that is said
_GONE = "The engine's actor is gone, or its node."


def connect(address: str) -> None:
    """Joins the cluster at `address`, or the one of this machine for `auto`.

    ConfigError if Ray is not installed, or if there is no cluster there.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "--cluster needs Ray; install it with pip install 'headrace[ray]'."
        ) from None
    try:
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--cluster: no Ray cluster answers at {address!r} ({error}); start one with "
            "ray start --head, or give the address of its head."
        ) from None


class RayEngine:
    """Keeps one actor alive: start, hear, and start another when it dies."""

    def __init__(self, config: ModelConfig, load_timeout_s: float) -> None:
        self._config = config
        self._load_timeout_s = load_timeout_s
        self.news = NewsQueue()
        self._actor: Any = None
        self._is_ready = False
        self._num_failed = 0  # actors in a row that could not be made
        self._unsent: list[ToEngine] = []
        self._has_unsent = asyncio.Event()
        self._closing = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="actor")
        self._task.add_done_callback(self._has_ended)

    def submit(self, submit: Submit) -> None:
        self._send(submit)

    def cancel(self, cancel: Cancel) -> None:
        self._send(cancel)

    def adapt(self, message: LoadAdapter | DropAdapter) -> None:
        self._send(message)

    async def close(self) -> None:
        self._closing.set()
        actor = self._actor
        if actor is not None and self._is_ready:
            with contextlib.suppress(Exception):  # it dies, one way or the other
                async with asyncio.timeout(_CLOSE_S):
                    await actor.close.remote()
        self._kill()
        self._task.cancel()
        await asyncio.wait([self._task])

    def _send(self, message: ToEngine) -> None:
        if self._is_ready:
            self._unsent.append(message)
            self._has_unsent.set()

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        failed = not task.cancelled() and task.exception()
        self.news.end(failed or None)

    async def _run(self) -> None:
        backoff = Backoff()
        clock = asyncio.get_running_loop().time
        while not self._closing.is_set():
            began = clock()
            down = await self._live_once()
            if self._closing.is_set():
                return
            pause_s = backoff.after(clock() - began)
            self.news.put(down)
            if down.given_up:
                return
            logger.warning("%s Starting another.", down.message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._closing.wait()

    async def _live_once(self) -> EngineDown:
        """One life of an actor, and how it ended."""
        from ray.exceptions import RayError

        needs = await asyncio.to_thread(_needs, self._config)
        self._actor = await asyncio.to_thread(
            _make_actor, self._config, self._load_timeout_s, needs
        )
        sending = asyncio.create_task(self._pump(self._actor), name="to actor")
        try:
            node, version = await self._settled(needs)
            if version != __version__:
                words = f"{node} has Headrace {version}, not {__version__}; install the same."
                return EngineDown("engine_failed", words, given_up=True)
            self._num_failed = 0
            return await self._hear(self._actor, node)
        except RayError as error:
            words = f"{_GONE} {str(error).strip().splitlines()[0]}"
            if getattr(error, "actor_init_failed", False):  # as without Headrace on the node
                words = str(error).strip()
                self._num_failed += 1
            is_hopeless = self._num_failed >= MAX_FAILED_STARTS
            return EngineDown("engine_failed", words, given_up=is_hopeless, from_outside=True)
        finally:
            self._is_ready = False
            self._unsent.clear()
            sending.cancel()
            self._kill()

    async def _settled(self, needs: dict[str, float]) -> tuple[str, str]:
        """Waits until the actor runs on some node.

        An autoscaler counts an actor that waits as demand. It must not be asked for nodes besides:
        its `request_resources` has one value for the whole cluster, which gateways would take
        from each other, and which stands when the one that set it is killed.
        """
        beginning = asyncio.ensure_future(self._actor.begin.remote())
        done, _ = await asyncio.wait((beginning,), timeout=_WAIT_TOLD_S)
        if not done:
            logger.warning("The engine waits for a node of the cluster with %s free.", needs)
        return _place_of(await beginning)

    async def _hear(self, actor: Any, node: str) -> EngineDown:
        """Passes on what the actor says, until it says that it gave up, or says nothing."""
        while True:
            try:
                async with asyncio.timeout(_SILENT_S):
                    packed = await actor.take.remote()
            except TimeoutError:
                words = f"The engine's actor on {node} has not answered for {_SILENT_S:g} s."
                return EngineDown("engine_failed", words, given_up=False, from_outside=True)
            for item in news_of(packed):
                if isinstance(item, Failed):
                    return EngineDown("engine_failed", item.message, given_up=False)
                if isinstance(item, Up):
                    self._is_ready = True
                    self.news.put(msgspec.structs.replace(item.news, node=node))
                elif not isinstance(item, Down):
                    self.news.put(item)
                elif item.news.given_up:
                    return item.news
                else:
                    self._is_ready = False
                    self._unsent.clear()
                    self.news.put(item.news)

    async def _pump(self, actor: Any) -> None:
        """One call at a time, so that messages keep their order."""
        from ray.exceptions import RayError

        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            batch, self._unsent = tuple(self._unsent), []
            with contextlib.suppress(RayError):  # who hears the actor learns of its death
                await actor.put.remote(encode(Sent(time.monotonic(), batch)))

    def _kill(self) -> None:
        import ray

        actor, self._actor = self._actor, None
        if actor is not None:
            with contextlib.suppress(Exception):  # it may be dead, or the cluster gone
                ray.kill(actor)


def _place_of(answer: Any) -> tuple[str, str]:
    node, version = answer
    return str(node), str(version)


def _needs(config: ModelConfig) -> dict[str, float]:
    """A replica's needs of a node: its threads, and a GPU where it computes on one."""
    import ray

    nodes = [it["Resources"] for it in ray.nodes() if it["Alive"]]
    smallest = min((int(it["CPU"]) for it in nodes if it.get("CPU")), default=1)
    has_gpu = config.device == "auto" and any(it.get("GPU") for it in nodes)
    is_on_gpu = config.device == "cuda" or has_gpu
    cores = (1 if is_on_gpu else smallest) if config.threads == "auto" else config.threads
    return {"CPU": cores, "GPU": 1} if is_on_gpu else {"CPU": cores}


def _make_actor(config: ModelConfig, load_timeout_s: float, needs: dict[str, float]) -> Any:
    import ray

    if config.threads == "auto":
        config = msgspec.structs.replace(config, threads=int(needs["CPU"]))
    actor: Any = ray.remote(EngineActor)
    name = (config.served_model_name or (os.path.basename(config.model),))[0]
    return actor.options(
        name=f"{name}-{secrets.token_hex(4)}",
        num_cpus=needs["CPU"],
        num_gpus=needs.get("GPU", 0),
        scheduling_strategy="SPREAD",
        max_restarts=0,  # another one takes its place, with another's sequences
        max_concurrency=16,
    ).remote(encode(config), load_timeout_s)
