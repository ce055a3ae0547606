"""Defines every setting with its default, its range and its description.

Flags, environment variables, keys of the TOML file and the reference in docs/ are generated from
these fields. Measured or computed values are never written back.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

# Only a message to somebody who exceeds one of these limits mentions it.
INTERNAL_LIMITS = (1 << 40, 1e9)
Count = Annotated[int, Meta(ge=1, le=INTERNAL_LIMITS[0])]
ToolFormatName = Literal[
    "qwen3-coder",
    "glm",
    "gemma4",
    "olmo3",
    "hermes",
    "mistral",
    "phi4",
    "deepseek",
    "pythonic",
    "llama3",
    "generic",
]
"""Modules in text/tool_formats. `auto` uses the first one whose marker is in the template."""
Milliseconds = Annotated[float, Meta(gt=0, le=INTERNAL_LIMITS[1])] | Literal["off"]


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that decide which sequences run next, and how much of each runs in one step."""

    max_num_seqs: Annotated[
        Count | None,
        Meta(
            description="Largest number of sequences that run at the same time; 64 on a CPU by "
            "default"
        ),
    ] = None
    max_step_tokens: Annotated[
        Count | None,
        Meta(description="Largest number of tokens processed in one step; 512 on a CPU by default"),
    ] = None
    max_stall_ms: Annotated[
        Milliseconds | None,
        Meta(
            description="Limit on the time between two tokens of a stream while other clients' "
            "prompts are processed, or off. Default: 200 on a CPU and 50 on CUDA; up to 500 if "
            "prompts would otherwise run at less than 80 % of their best throughput"
        ),
    ] = None
    max_step_ms: Annotated[
        Milliseconds,
        Meta(description="Longest duration of a step while no stream is decoding, or off"),
    ] = 1000.0
    prompt_share: Annotated[
        Annotated[float, Meta(gt=0, le=100)] | None,
        Meta(
            description="Minimum time for prompts in each step, as a fraction of the time for the "
            "running streams; by default 0.25 with --max-stall-ms and 1.4 without it"
        ),
    ] = None
    patience: Annotated[
        float,
        Meta(
            ge=0,
            le=1000,
            description="How long a prompt may wait while shorter, later prompts overtake it, "
            "as a multiple of the time to process the prompt; 0 means strictly "
            "first come, first served",
        ),
    ] = 4.0
    guess: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | Literal["auto", "off"],
        Meta(
            description="Largest number of tokens that are guessed per stream and step "
            "(speculative decoding). Guesses come from repetitions in the stream's text, from a "
            "grammar that leaves no choice, or from --draft. The text does not change, except "
            "with experts on processors with AMX. auto: up to 8, on CPU kernels only"
        ),
    ] = "auto"
    max_open_prompts: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="Largest number of prompts that are processed at the same time; later "
            "prompts wait",
        ),
    ] = 4


class PrefixCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for cached prefixes on disk."""

    prefix_cache_dir: Annotated[
        str | None,
        Meta(
            title="FOLDER|auto|none",
            description="Folder in which cached prefixes are stored, so that restarts and other "
            "engines find them. It contains the tokens of prompts and answers. auto: "
            "$XDG_CACHE_HOME/headrace/prefixes, if the folder is on a local disk. Default: "
            "auto for headrace serve, but none with --state-dir none or --cluster, and none "
            "for the Python class LLM",
        ),
    ] = None
    prefix_cache_disk_bytes: Annotated[
        Count | None,
        Meta(
            description="Maximum size of the prefix folder in bytes; the least recently used "
            "prefixes are deleted. Default: 20 GiB, but for auto a tenth of the free "
            "disk space, at most 10 GiB, and nothing if less than 5 GiB are free"
        ),
    ] = None
    prefix_cache_disk_days: Annotated[
        float,
        Meta(gt=0, le=36500, description="Days without use after which a stored prefix is deleted"),
    ] = 7.0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for one model and the engine that runs the model."""

    model: Annotated[
        str,
        Meta(
            description="Folder with a model, GGUF file, hub id, headrace-mini, or a name of "
            "`headrace models available`"
        ),
    ] = "headrace-mini"
    revision: Annotated[
        str | None,
        Meta(title="REVISION", description="Branch, tag or commit of a model on the hub"),
    ] = None
    mmproj: Annotated[
        str,
        Meta(
            title="FILE|auto|none",
            description="GGUF file with the vision part of a GGUF model. auto: the mmproj*.gguf "
            "that was downloaded with the model or is in its folder; none: text only",
        ),
    ] = "auto"
    served_model_name: Annotated[
        tuple[str, ...], Meta(title="NAME", description="Names by which clients request the model")
    ] = ()
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Meta(description="Number format of weights and cache; auto: that of the checkpoint"),
    ] = "auto"
    quantize: Annotated[
        Literal["auto", "none", "int8", "int4"],
        Meta(
            description="Quantize weights to 8 or 4 bits on a CPU, which cuts the memory "
            "traffic to a half or a third and loses some precision. auto: keep the "
            "format of GGUF and MXFP4 files, and do not quantize other files. none: "
            "quantize nothing, and unpack GGUF and MXFP4 files"
        ),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="Device that runs the model")
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "amx", "bf16dot", "avx512", "avx2", "neon", "plain"],
        Meta(
            description="Instruction set of the CPU kernels; plain: PyTorch's own operations; "
            "auto: the fastest that this processor supports"
        ),
    ] = "auto"
    lane: Annotated[
        Literal[
            "auto", "native-text", "native-multimodal", "generic-text", "generic-multimodal",
            "generic-seq2seq-source", "llama-cpp",
        ],
        Meta(description="How the model is run; auto: chosen by the model's architecture"),
    ] = "auto"  # fmt: skip
    threads: Annotated[
        Count | Literal["auto"],
        Meta(description="Compute threads; auto: all cores, or one less on a laptop"),
    ] = "auto"
    nice: Annotated[
        int,
        Meta(
            ge=0,
            le=19,
            description="Niceness of the engine's process; 19 yields to all other processes",
        ),
    ] = 0
    max_model_len: Annotated[
        Count | None,
        Meta(description="Largest number of tokens in a prompt and its answer together"),
    ] = None
    kv_cache_memory_bytes: Annotated[
        Count | None, Meta(description="Memory for the KV cache, in bytes")
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "int8"],
        Meta(description="Number format of keys and values; int8 needs a native lane on a CPU"),
    ] = "auto"
    block_size: Annotated[
        int, Meta(ge=1, le=1024, description="Token positions per block of the KV cache")
    ] = 32
    generation_config: Annotated[
        Literal["auto", "none"],
        Meta(
            description="Use the model's recommended sampling parameters as defaults (auto) or not "
            "(none)"
        ),
    ] = "auto"
    chat_template: Annotated[
        str | None,
        Meta(title="FILE", description="File with a chat template that replaces the model's own"),
    ] = None
    tool_format: Annotated[
        Literal["auto", "none", ToolFormatName],
        Meta(
            description="Format in which the model writes tool calls; auto: as its chat template "
            "shows. generic describes the tools in the system message, for models whose template "
            "does not support tools"
        ),
    ] = "auto"
    reasoning_format: Annotated[
        Literal["auto", "none", "think", "mistral", "gemma4", "harmony"],
        Meta(
            description="Format in which the model marks its reasoning; auto: as its chat template "
            "shows"
        ),
    ] = "auto"
    special_tokens_in_text: Annotated[
        Literal["allow", "escape"],
        Meta(
            description="What to do when a message spells out a special token, such as <|im_end|>: "
            "allow reads it as that token, escape breaks it up with a zero-width space"
        ),
    ] = "allow"
    draft: Annotated[
        str | None,
        Meta(
            title="mtp|off|MODEL",
            description="What guesses the next tokens (speculative decoding): mtp, the model's own "
            "MTP layer (the default if it has one); off; or a small model with the same tokenizer: "
            "a folder, a GGUF file, or the name of a model on this machine. The text does not "
            "change, except with experts on processors with AMX. Works on CPU kernels only",
        ),
    ] = None
    pooling: Annotated[
        Literal["auto", "cls", "max", "mean", "mean_sqrt_len", "weightedmean", "last"],
        Meta(
            description="How token vectors become one embedding of length 1; auto: as the model's "
            "files say"
        ),
    ] = "auto"
    embedding_dimensions: Annotated[
        Literal["auto", "any"],
        Meta(
            description="Lengths to which embeddings may be shortened; auto: the lengths that "
            "the model states"
        ),
    ] = "auto"
    prefill_assistant: Annotated[
        bool,
        Meta(
            description="Let chat completions continue an assistant message at the end of the "
            "conversation, as llama.cpp does, unless the request sets continue_final_message or "
            "add_generation_prompt"
        ),
    ] = False
    return_progress: Annotated[
        Literal["off", "on"],
        Meta(description="Report prompt progress to clients that do not ask for it"),
    ] = "off"
    replicas: Annotated[
        Annotated[int, Meta(ge=1, le=64)],
        Meta(description="Number of engines that run this model side by side"),
    ] = 1
    min_replicas: Annotated[
        Annotated[int, Meta(ge=0, le=64)] | None,
        Meta(
            description="Number of engines that stay while the model is idle; the others stop "
            "after --idle-unload-s. With 0 the model is loaded on demand. Default: all"
        ),
    ] = None
    adapter: Annotated[
        tuple[Annotated[str, Meta(pattern="^[^=]+=.+$", examples=["sql=./sql-lora"])], ...],
        Meta(
            title="NAME=PATH",
            description="LoRA adapter as NAME=PATH, a PEFT folder or a GGUF file. Clients request "
            "it by NAME, like a model",
        ),
    ] = ()
    scheduler: SchedulerConfig = SchedulerConfig()
    prefix_cache: PrefixCacheConfig = PrefixCacheConfig()


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for the HTTP server."""

    host: Annotated[str, Meta(title="ADDRESS", description="Address to listen on")] = "127.0.0.1"
    port: Annotated[
        int,
        Meta(ge=0, le=65535, title="PORT", description="Port to listen on; 0 chooses a free port"),
    ] = 8000
    api_key: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(
            title="KEY",
            description="API keys, one of which clients must send; without keys anybody may "
            "connect. Other users of this machine can see the flag in the process "
            "list, so prefer HEADRACE_API_KEYS or a file",
        ),
    ] = ()
    api_key_file: Annotated[
        str | None,
        Meta(
            description="File with additional API keys, one per line, as key or name:key; # "
            "starts a comment. SIGHUP reloads it. The log contains names, never keys"
        ),
    ] = None
    admin_key: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            title="KEY",
            description="Key for /manage, /metrics and changes of models (POST /models, adapters), "
            "for which clients' keys are not enough. Other users of this machine can "
            "see the flag in the process list, so prefer HEADRACE_ADMIN_KEY",
        ),
    ] = None
    admin_key_file: Annotated[
        str | None,
        Meta(description="File with additional admin keys, in the format of --api-key-file"),
    ] = None
    max_body_bytes: Annotated[int, Meta(ge=1, description="Largest request body in bytes")] = (
        32 << 20
    )
    allow_image_urls: Annotated[
        bool,
        Meta(
            description="Download images that requests name by http or https URLs, from public "
            "hosts only, within 10 s and 20 MiB"
        ),
    ] = False
    max_connections: Annotated[
        Count, Meta(description="Largest number of connections, if the limit on open files allows")
    ] = 4096
    headers_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds in which a request's headers must be complete")
    ] = 10.0
    body_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds that a request's body may pause")
    ] = 20.0
    api_prefix: Annotated[
        Annotated[str, Meta(pattern=r"^((/[A-Za-z0-9._~-]+)+)?$", examples=["/llm"])],
        Meta(title="PREFIX", description="Path prefix of all routes and of the page, such as /llm"),
    ] = ""
    allowed_host: Annotated[
        tuple[str, ...],
        Meta(
            title="NAME",
            description="Host names, besides loopback names, that are accepted without a key",
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(
            title="ORIGIN",
            description="Origins whose pages may use the API (https://app.example), or *",
        ),
    ] = ()
    ssl_certfile: Annotated[
        str | None,
        Meta(description="Certificate chain (PEM) for HTTPS; SIGHUP reloads it"),
    ] = None
    ssl_keyfile: Annotated[
        str | None, Meta(description="Private key of the certificate, if it is in another file")
    ] = None
    vllm_metrics: Annotated[
        bool, Meta(description="Add vLLM's metric names to /metrics, for dashboards made for vLLM")
    ] = False


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for streams and the clients of streams."""

    max_num_queued_reqs: Annotated[
        int,
        Meta(
            ge=0,
            description="Largest number of waiting choices (n per prompt); additional requests "
            "get 429. One API key may use half of it",
        ),
    ] = 512
    max_num_queued_tokens: Annotated[
        Count | None,
        Meta(
            description="Largest number of waiting prompt tokens. Default: as many as can be "
            "processed in 600 s, and at least one context. An empty queue accepts any prompt "
            "that fits the context. One API key may use half of the limit"
        ),
    ] = None
    max_total_input_bytes: Annotated[
        Count | None,
        Meta(description="Memory in bytes for the inputs of all requests. Default: 1/8 of memory"),
    ] = None
    queue_timeout_s: Annotated[
        float,
        Meta(ge=0, description="Seconds that a request may wait before it starts; 0: no limit"),
    ] = 600.0
    request_timeout_s: Annotated[
        float, Meta(ge=0, description="Seconds that a whole request may take; 0: no limit")
    ] = 0.0
    key_requests_per_minute: Annotated[
        Count | None,
        Meta(description="Requests per minute and key; by default unlimited"),
    ] = None
    key_tokens_per_minute: Annotated[
        Count | None,
        Meta(description="Tokens of prompts and answers per minute and key; by default unlimited"),
    ] = None
    heartbeat_s: Annotated[
        float,
        Meta(ge=1, le=10, description="Seconds without a data frame until a heartbeat is sent"),
    ] = 5.0
    sse_ping_interval: Annotated[
        int,
        Meta(
            ge=-1,
            le=60,
            title="SECONDS",
            description="Seconds without a byte until a comment is sent; -1: never",
        ),
    ] = -1
    return_progress_for: Annotated[
        tuple[
            Annotated[
                str,
                Meta(
                    pattern="^(key|agent):.+=(off|on|reasoning)$",
                    examples=["agent:opencode/*=reasoning"],
                ),
            ],
            ...,
        ],
        Meta(
            title="CLIENT=CHOICE",
            description="Report prompt progress to some clients only, by key name (key:ann=on) "
            "or User-Agent (agent:opencode/*=reasoning, which writes progress as "
            "reasoning text). The first match takes precedence over "
            "--return-progress",
        ),
    ] = ()
    inserted_texts: Annotated[
        Literal["leave-out", "keep"],
        Meta(
            description="Texts that some clients insert at the start of each prompt, each time "
            "different. leave-out: remove these texts, so that cached prefixes "
            "match. keep: change nothing"
        ),
    ] = "leave-out"
    log_prompt_excerpts: Annotated[
        bool,
        Meta(
            description="Log the words where a prompt first differs from the conversation's "
            "previous prompt; otherwise only the position of the difference is "
            "logged"
        ),
    ] = False
    linger_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds that a request continues after its client disconnects before "
            "the first token, unless another request has to wait. An equal request within this "
            "time finds the result. Always 0 for requests with attach: false",
        ),
    ] = 10.0
    state_dir: Annotated[
        str | None,
        Meta(
            title="FOLDER|redis://…|none",
            description="Folder for streams that survive the server, redis://HOST:PORT/DB to "
            "share streams between servers, or none to keep streams in memory. "
            "Default: $XDG_STATE_HOME/headrace/PORT",
        ),
    ] = None
    keep_streams_hours: Annotated[
        float,
        Meta(gt=0, le=876000, description="Hours that durable streams are kept after their end"),
    ] = 24.0
    max_kept_streams: Annotated[
        Count,
        Meta(
            description="Largest number of durable streams; beyond it, the ended streams that were "
            "read least recently are deleted"
        ),
    ] = 10_000
    max_kept_stream_bytes: Annotated[
        Count,
        Meta(
            description="Largest size of all durable streams in bytes; beyond it, streams are "
            "deleted as for --max-kept-streams"
        ),
    ] = 1 << 30
    load_timeout_s: Annotated[
        float,
        Meta(
            gt=0, description="Seconds after which a model that is still loading counts as failed"
        ),
    ] = 600.0
    drain_s: Annotated[
        float,
        Meta(ge=0, description="Seconds that running requests may take to finish at shutdown"),
    ] = 30.0


class BatchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for files, and for batches, which are answered while the server is idle."""

    max_file_bytes: Annotated[Count, Meta(description="Largest batch file in bytes")] = 200 << 20
    key_file_bytes: Annotated[
        Count,
        Meta(description="Largest total size in bytes of one key's files, including batch results"),
    ] = 2 << 30
    keep_files_days: Annotated[
        float,
        Meta(gt=0, le=36500, description="Days after which files and finished batches are deleted"),
    ] = 30.0
    max_batch_lines: Annotated[Count, Meta(description="Largest number of requests in a batch")] = (
        50_000
    )


class LoadingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the models that a server with several models keeps in memory."""

    models_dir: Annotated[
        str | None,
        Meta(
            description="Folder whose subfolders and GGUF files are models, served by their names"
        ),
    ] = None
    max_models: Annotated[
        Count | None, Meta(description="Largest number of models in memory, if there are several")
    ] = None
    models_memory_bytes: Annotated[
        Count | None,
        Meta(
            description="Memory in bytes for the weights and caches of all models, if there are "
            "several"
        ),
    ] = None
    idle_unload_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="Seconds without requests after which a model is unloaded, if the server "
            "has several, and after which engines in excess of --min-replicas stop"
        ),
    ] = None


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a server."""

    models: tuple[ModelConfig, ...] = (ModelConfig(),)
    alias: Annotated[
        tuple[Annotated[str, Meta(pattern="^[^=]+=.+$", examples=["claude-*=headrace-mini"])], ...],
        Meta(
            title="NAME=MODEL",
            description="Additional name of a model or adapter, as NAME=MODEL; * in NAME stands "
            "for any characters. A value without = is a --served-model-name",
        ),
    ] = ()
    loading: LoadingConfig = LoadingConfig()
    batches: BatchConfig = BatchConfig()
    http: HttpConfig = HttpConfig()
    streams: StreamConfig = StreamConfig()
    cluster: Annotated[
        str | None,
        Meta(
            title="ADDRESS",
            description="Address of a Ray cluster whose nodes run the engines; without a value, "
            "the cluster of this machine",
        ),
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        Meta(
            title="URL",
            description="OpenTelemetry collector for traces (OTLP over HTTP), such as "
            "http://127.0.0.1:4318. Default: OTEL_EXPORTER_OTLP_ENDPOINT, or none",
        ),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Lowest level of messages in the log"),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        Meta(description="Format of the log on stderr; json writes exactly one object per line"),
    ] = "text"
