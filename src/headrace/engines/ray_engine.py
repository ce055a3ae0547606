"""Runs an engine in an actor on some node of a Ray cluster, behind the EngineClient interface.

Ray is imported when the first such engine is created, and never without `--cluster`. This process
owns the actor, so the actor ends with this process. No stream is lost, because the sequences can be
submitted to another engine. An engine without a gateway would only hold memory.
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
# An actor that has answered before counts as dead after this time without an answer.
_SILENT_S = 15.0
_CLOSE_S = 5.0
# The waiting time for a node after which a warning is logged.
_WARN_AFTER_S = 15.0
_GONE = "The engine's actor or its node is gone."


def connect(address: str) -> None:
    """Join the cluster at `address`; `auto` joins the cluster of this machine.

    Raises ConfigError if Ray is not installed, or if no cluster answers at the address.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "--cluster needs Ray; run pip install '.[ray]' in the checkout."
        ) from None
    try:
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--cluster: no Ray cluster answers at {address!r} ({error}); start one with "
            "ray start --head, or give the address of its head."
        ) from None


class RayEngine:
    """Keeps one actor alive: starts an actor, follows its messages, and replaces a dead actor."""

    def __init__(self, config: ModelConfig, load_timeout_s: float) -> None:
        self._config = config
        self._load_timeout_s = load_timeout_s
        self.news = NewsQueue()
        self._actor: Any = None
        self._is_ready = False
        # The number of consecutive actors that could not be created.
        self._num_failed = 0
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
            # The actor is killed below even if this call fails.
            with contextlib.suppress(Exception):
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
            logger.warning("%s Starting another actor.", down.message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._closing.wait()

    async def _live_once(self) -> EngineDown:
        """Run one actor until it dies; describe its end."""
        from ray.exceptions import RayError

        needs = await asyncio.to_thread(_needs, self._config)
        self._actor = await asyncio.to_thread(
            _make_actor, self._config, self._load_timeout_s, needs
        )
        sending = asyncio.create_task(self._pump(self._actor), name="to actor")
        try:
            node, version = await self._wait_for_node(needs)
            if version != __version__:
                words = f"Node {node} has Headrace {version}; install {__version__} there."
                return EngineDown("engine_failed", words, given_up=True)
            self._num_failed = 0
            return await self._follow_news(self._actor, node)
        except RayError as error:
            words = f"{_GONE} {str(error).strip().splitlines()[0]}"
            # The actor could not be created, for example because the node lacks Headrace.
            if getattr(error, "actor_init_failed", False):
                words = str(error).strip()
                self._num_failed += 1
            is_hopeless = self._num_failed >= MAX_FAILED_STARTS
            return EngineDown("engine_failed", words, given_up=is_hopeless, from_outside=True)
        finally:
            self._is_ready = False
            self._unsent.clear()
            sending.cancel()
            self._kill()

    async def _wait_for_node(self, needs: dict[str, float]) -> tuple[str, str]:
        """Wait until the actor runs on some node.

        An autoscaler already counts a waiting actor as demand, so Ray's `request_resources` is not
        called. That request has a single value for the whole cluster. Gateways would overwrite each
        other's value, and a dead gateway's value would stay in force.
        """
        beginning = asyncio.ensure_future(self._actor.begin.remote())
        done, _ = await asyncio.wait((beginning,), timeout=_WARN_AFTER_S)
        if not done:
            logger.warning("The engine waits for a node of the cluster with %s free.", needs)
        return _node_and_version(await beginning)

    async def _follow_news(self, actor: Any, node: str) -> EngineDown:
        """Forward the actor's messages until the actor gives up or stops answering."""
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
        """Send all waiting messages in one call, and wait for its end, to keep their order."""
        from ray.exceptions import RayError

        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            batch, self._unsent = tuple(self._unsent), []
            # `_follow_news` also notices a dead actor, so the error can be ignored here.
            with contextlib.suppress(RayError):
                await actor.put.remote(encode(Sent(time.monotonic(), batch)))

    def _kill(self) -> None:
        import ray

        actor, self._actor = self._actor, None
        if actor is not None:
            # The actor can be dead already, or the cluster can be gone.
            with contextlib.suppress(Exception):
                ray.kill(actor)


def _node_and_version(answer: Any) -> tuple[str, str]:
    node, version = answer
    return str(node), str(version)


def _needs(config: ModelConfig) -> dict[str, float]:
    """Return the resources for an engine: processor cores for its threads, and perhaps a GPU."""
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
        # RayEngine starts a new actor, and `generation` submits the sequences again.
        max_restarts=0,
        max_concurrency=16,
    ).remote(encode(config), load_timeout_s)
