"""Loads a model into the caller's process, with options that type checkers know."""

import os
from collections.abc import Callable
from typing import Any, Literal

from headrace.llm.host import Host
from headrace.llm.tokenizer import ModelTokenizer
from headrace_common.answer import Messages
from headrace_common.config import sources
from headrace_common.config.settings import ServerConfig
from headrace_common.errors import ConfigError, RequestError
from headrace_common.ingestion import Plan
from headrace_common.loading import LoadProgress
from headrace_common.messages import Ready


class LoadedModel:
    """The parts that LLM and AsyncLLM share: loading, and the description of the model."""

    _waits_for_load = True

    def __init__(
        self,
        model: str | os.PathLike[str] | ServerConfig = "headrace-mini",
        on_progress: Callable[[LoadProgress], None] | None = None,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_step_tokens: int | None = None,
        max_stall_ms: float | Literal["off"] | None = None,
        kv_cache_memory_bytes: int | None = None,
        dtype: Literal["auto", "float32", "bfloat16"] | None = None,
        quantize: Literal["auto", "none", "int8", "int4"] | None = None,
        device: Literal["auto", "cpu", "cuda"] | None = None,
        threads: int | Literal["auto"] | None = None,
        chat_template: str | None = None,
        adapter: tuple[str, ...] | None = None,
        prefix_cache_dir: str | None = None,
        **options: Any,
    ) -> None:
        """Load a model.

        Args:
            model: A name such as "smollm2", a hub id, a folder, a GGUF file or a ServerConfig.
            on_progress: A thread calls this function when a longer stage of the load begins, and
                at least every two seconds. Without it, a terminal shows a bar.
            max_model_len: Largest number of tokens in a prompt and its answer together.
            max_num_seqs: Largest number of sequences that run at the same time.
            max_step_tokens: Largest number of tokens processed in one step.
            max_stall_ms: Limit on the time between two tokens of a stream while other prompts are
                processed.
            kv_cache_memory_bytes: Memory for the KV cache.
            dtype: Number format of weights and cache.
            quantize: Quantize the weights to 8 or 4 bits.
            device: Device that runs the model.
            threads: Number of compute threads.
            chat_template: File with a chat template that replaces the model's own.
            adapter: LoRA adapters, each as "NAME=PATH".
            prefix_cache_dir: Folder in which cached prefixes survive this process.
            **options: Other flags of `headrace serve`, with underscores.

        Raises:
            ConfigError: An option is unknown or wrong.
            ModelError: The model is missing or cannot run.
        """
        named = {
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_step_tokens": max_step_tokens,
            "max_stall_ms": max_stall_ms,
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
            "dtype": dtype,
            "quantize": quantize,
            "device": device,
            "threads": threads,
            "chat_template": chat_template,
            "adapter": adapter,
            "prefix_cache_dir": prefix_cache_dir,
        }
        given = {name: value for name, value in named.items() if value is not None} | options
        self._host = Host(_config_of(model, given), on_progress, self._waits_for_load, self)

    @property
    def ready(self) -> Ready:
        """The loaded model's lane, numbers and limits."""
        return self._loaded_host.ready

    @property
    def tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer, with `encode`, `decode` and `count`."""
        return ModelTokenizer(self._loaded_host)

    def plan(self, messages: Messages | str | None = None, **fields: Any) -> Plan:
        """Return how the model would process a prompt, without processing it.

        Args:
            messages: Messages as in `chat`. For raw text, pass `prompt=...` instead.
            **fields: Fields that change the prompt, such as `tools`.

        Example:
            >>> plan = llm.plan("What turns a mill?")
            >>> plan.lane, plan.prompt_tokens, plan.min_chunks, plan.memory, plan.why
        """
        plan: Plan = self._loaded_host.plan(messages, fields)
        return plan

    @property
    def _loaded_host(self) -> Host:
        if not self._host.has_started.done():
            message = "The model is still loading; use `async with` to wait for the load."
            raise RequestError("model_loading", message)
        self._host.has_started.result()
        return self._host

    def __repr__(self) -> str:
        name = type(self).__name__
        if not self._host.has_started.done():
            return f"<{name}: loading>"
        if self._host.has_started.exception() is not None:
            return f"<{name}: the load failed>"
        model, ready = self._host.model.names[0], self._host.ready
        size = f"{ready.num_parameters:,} parameters in {ready.dtype}"
        limits = f"{ready.max_num_seqs} sequences, {ready.max_model_len} tokens"
        return f"<{name} {model}: {size}, {ready.lane} on {ready.device}, {limits}>"


def _config_of(model: object, options: dict[str, Any]) -> ServerConfig:
    if isinstance(model, ServerConfig):
        if options:
            names = ", ".join(options)
            raise ConfigError(f"A ServerConfig takes no further options, but got {names}.")
        return model
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(
            f"model must be a name such as 'smollm2', a path or a ServerConfig, not {model!r}."
        )
    return sources.load({"model": os.fspath(model), **options}, {}, None, are_options=True)
