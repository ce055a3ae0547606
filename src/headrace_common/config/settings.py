"""Every setting, its default, its range and its one-line description; frozen, never patched.

Flags, environment variables, keys of the TOML file and docs/cli.md are generated from these
fields. What is measured or computed (layouts, limits) is never written back here.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1, le=1 << 40)]
ToolFormatName = Literal[
    "qwen3-coder", "glm", "hermes", "mistral", "deepseek", "pythonic", "llama3", "generic"
]
"""Each is a module of text/tool_formats. A chat template has the first one whose sign it has."""
Milliseconds = Annotated[float, Meta(gt=0, le=1e9)] | Literal["off"]


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Who runs next, and how much of it in one step."""

    max_num_seqs: Annotated[
        Count | None, Meta(description="Sequences that run at once; 64 on a CPU")
    ] = None
    max_step_tokens: Annotated[
        Count | None,
        Meta(description="Tokens one step computes at most; 512 on a CPU"),
    ] = None
    max_stall_ms: Annotated[
        Milliseconds | None,
        Meta(
            description="Time between two tokens of a stream that prompts of others may cause, "
            "or off; if not given 200 on a CPU and 50 on CUDA, or 2.4 times what the streams "
            "alone take if that is more"
        ),
    ] = None
    max_step_ms: Annotated[
        Milliseconds,
        Meta(description="Time of one step while no stream is being generated, or off"),
    ] = 1000.0
    prompt_share: Annotated[
        Annotated[float, Meta(gt=0, le=100)] | None,
        Meta(
            description="Time that prompts get in any case, as a share of what the running "
            "streams alone take; 0.25 with --max-stall-ms, 1.4 without"
        ),
    ] = None
    patience: Annotated[
        float,
        Meta(
            ge=0,
            le=1000,
            description="How many times its own duration a prompt may wait behind later, "
            "shorter ones; 0 is strict first come, first served",
        ),
    ] = 4.0
    guess: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | Literal["auto", "off"],
        Meta(
            description="Tokens that a stream may guess in a step, where its own text repeats or "
            "a grammar leaves no choice, so that one step may give several; no token changes. "
            "auto: up to 8, on CPU kernels alone"
        ),
    ] = "auto"
    max_open_prompts: Annotated[
        int, Meta(ge=1, le=4096, description="Prompts in work beyond which no later one starts")
    ] = 4


class PrefixCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Prefixes on disk."""

    prefix_cache_dir: Annotated[
        str | None,
        Meta(
            description="Folder for what prompts and answers left in the cache, so that restarts "
            "and engines find it; it holds their tokens. Not kept on disk if not given"
        ),
    ] = None
    prefix_cache_disk_bytes: Annotated[
        Count, Meta(description="Size of that folder beyond which the least recently used leaves")
    ] = 20 << 30
    prefix_cache_disk_days: Annotated[
        float, Meta(gt=0, le=36500, description="Days without use after which it leaves")
    ] = 7.0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One model and the engine that runs it."""

    model: Annotated[
        str, Meta(description="Folder with a model, hub id, smollm2, or headrace-mini")
    ] = "headrace-mini"
    revision: Annotated[
        str | None, Meta(description="Branch, tag or commit of a model on the hub")
    ] = None
    served_model_name: Annotated[
        tuple[str, ...], Meta(description="Names that clients may ask for")
    ] = ()
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Meta(description="Number format of weights and cache; auto: the checkpoint's own"),
    ] = "auto"
    quantize: Annotated[
        Literal["auto", "none", "int8", "int4"],
        Meta(
            description="Weights in 8 or 4 bits on a CPU: half or a third of the memory to read, a "
            "loss; auto: as GGUF and MXFP4 files have them, else none; none unpacks such files"
        ),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="Where the model is computed")
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "amx", "bf16dot", "avx512", "avx2", "neon", "plain"],
        Meta(
            description="Instructions that compute on a CPU; plain: torch alone; auto: the best "
            "that the processor has"
        ),
    ] = "auto"
    lane: Annotated[
        Literal[
            "auto",
            "native-text",
            "native-multimodal",
            "generic-text",
            "generic-multimodal",
            "generic-seq2seq-source",
            "llama-cpp",
        ],
        Meta(description="How the model is run; auto: chosen by its architecture"),
    ] = "auto"  # fmt: skip
    threads: Annotated[
        Count | Literal["auto"],
        Meta(description="Compute threads; auto: all cores, on a laptop one less for its user"),
    ] = "auto"
    nice: Annotated[
        int, Meta(ge=0, le=19, description="Niceness of the engine's process: 19 yields to all")
    ] = 0
    max_model_len: Annotated[
        Count | None, Meta(description="Prompt and answer together, in tokens")
    ] = None
    kv_cache_memory_bytes: Annotated[
        Count | None, Meta(description="Memory for cached keys and values")
    ] = None
    block_size: Annotated[
        int, Meta(ge=1, le=1024, description="Token positions per block of that memory")
    ] = 32
    generation_config: Annotated[
        Literal["auto", "none"],
        Meta(description="Whether the model's own sampling defaults are taken"),
    ] = "auto"
    chat_template: Annotated[
        str | None, Meta(description="File with a chat template to use instead of the model's")
    ] = None
    tool_format: Annotated[
        Literal["auto", "none", ToolFormatName],
        Meta(
            description="How the model writes tool calls; auto: as its chat template says, and "
            "generic, by a text before the conversation, if that knows no tools"
        ),
    ] = "auto"
    reasoning_format: Annotated[
        Literal["auto", "none", "think", "mistral", "harmony"],
        Meta(description="How it sets its reasoning apart; auto: as its chat template says"),
    ] = "auto"
    special_tokens_in_text: Annotated[
        Literal["allow", "escape"],
        Meta(
            description="What happens when a message spells out a special token, such as "
            "<|im_end|>: allow reads it as that token, escape breaks it up with a zero-width space"
        ),
    ] = "allow"
    pooling: Annotated[
        Literal["auto", "cls", "max", "mean", "mean_sqrt_len", "weightedmean", "last"],
        Meta(
            description="How an embedding is made of a text, of length 1; auto: as the model's "
            "files say"
        ),
    ] = "auto"
    embedding_dimensions: Annotated[
        Literal["auto", "any"],
        Meta(description="Lengths that embeddings may be cut to; auto: those the model names"),
    ] = "auto"
    return_progress: Annotated[
        Literal["off", "on"],
        Meta(description="Whether streams tell the progress of their prompt where nobody asks"),
    ] = "off"
    replicas: Annotated[
        Annotated[int, Meta(ge=1, le=64)],
        Meta(description="Engines that run this model side by side"),
    ] = 1
    min_replicas: Annotated[
        Annotated[int, Meta(ge=0, le=64)] | None,
        Meta(
            description="Engines that stay while there is nothing to do, the others leave after "
            "--idle-unload-s; with 0 the model is loaded when it is asked for. All if not given"
        ),
    ] = None
    adapter: Annotated[
        tuple[Annotated[str, Meta(pattern="^[^=]+=.+$", examples=["sql=./sql-lora"])], ...],
        Meta(
            description="Adapter (LoRA) as NAME=PATH, a folder of PEFT's or a GGUF file: asked for "
            "as a model by its name"
        ),
    ] = ()
    scheduler: SchedulerConfig = SchedulerConfig()
    prefix_cache: PrefixCacheConfig = PrefixCacheConfig()


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The listening side."""

    host: Annotated[str, Meta(description="Address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port; 0 takes a free one")] = 8000
    api_key: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(
            description="Keys that clients must send one of; none: open. Others here can see them "
            "in the list of processes: rather set HEADRACE_API_KEYS, or give a file"
        ),
    ] = ()
    api_key_file: Annotated[
        str | None,
        Meta(
            description="File with more of them, a line of key or name:key each; # begins a "
            "comment. Read again on SIGHUP; the log says names, never keys"
        ),
    ] = None
    admin_key: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Key for /manage, /metrics and changes of the models (POST /models, "
            "adapters), which clients' keys do not open; others here can see it in the list of "
            "processes: rather set HEADRACE_ADMIN_KEY"
        ),
    ] = None
    admin_key_file: Annotated[
        str | None, Meta(description="File with more of them, as of --api-key-file")
    ] = None
    max_body_bytes: Annotated[int, Meta(ge=1, description="Largest request body")] = 32 << 20
    allow_image_urls: Annotated[
        bool,
        Meta(
            description="Fetch images that requests name by http or https addresses, from public "
            "hosts alone, within 10 s and 20 MiB"
        ),
    ] = False
    max_connections: Annotated[
        Count, Meta(description="Connections at once, if the limit on descriptors allows as many")
    ] = 4096
    headers_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds in which the headers of a request must be whole")
    ] = 10.0
    body_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds that a request's body may pause")
    ] = 20.0
    api_prefix: Annotated[
        Annotated[str, Meta(pattern=r"^((/[A-Za-z0-9._~-]+)+)?$", examples=["/llm"])],
        Meta(description="Path below which all routes lie, the page too, such as /llm"),
    ] = ""
    allowed_host: Annotated[
        tuple[str, ...], Meta(description="Host names served beside loopback without a key")
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(description="Origins whose pages may use the API (https://app.example), or *"),
    ] = ()
    ssl_certfile: Annotated[
        str | None,
        Meta(description="Certificate chain (PEM) to serve HTTPS with; read again on SIGHUP"),
    ] = None
    ssl_keyfile: Annotated[
        str | None, Meta(description="Its private key, if that is not in the same file")
    ] = None
    vllm_metrics: Annotated[
        bool, Meta(description="Show /metrics by vLLM's names too, for dashboards made for it")
    ] = False


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the server treats streams and the clients behind them."""

    max_num_queued_reqs: Annotated[
        int,
        Meta(ge=0, description="Choices that may wait, n to a prompt; one more request gets 429"),
    ] = 512
    max_num_queued_tokens: Annotated[
        Count | None,
        Meta(
            description="Prompt tokens that may wait; if not given, as many as are read in 600 s, "
            "and at least one context. An empty queue takes any prompt that fits the context"
        ),
    ] = None
    queue_timeout_s: Annotated[
        float, Meta(ge=0, description="Seconds that a request may wait to be started; 0: no limit")
    ] = 600.0
    request_timeout_s: Annotated[
        float, Meta(ge=0, description="Seconds that a whole request may take; 0: no limit")
    ] = 0.0
    key_requests_per_minute: Annotated[
        Count | None,
        Meta(description="Requests that one key may make each minute; no limit if not given"),
    ] = None
    key_tokens_per_minute: Annotated[
        Count | None,
        Meta(
            description="Tokens that one key may use each minute, of prompts and answers; no "
            "limit if not given"
        ),
    ] = None
    heartbeat_s: Annotated[
        float,
        Meta(ge=1, le=10, description="Seconds without a data frame until a heartbeat is sent"),
    ] = 5.0
    sse_ping_interval: Annotated[
        int,
        Meta(ge=-1, le=60, description="Seconds without a byte until a comment is sent; -1: never"),
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
            description="Who is told it, before that: the key of a name (key:ann=on), or clients "
            "by their User-Agent (agent:opencode/*=reasoning: in words, too, where reasoning "
            "would stand); the first that fits counts"
        ),
    ] = ()
    inserted_texts: Annotated[
        Literal["leave-out", "keep"],
        Meta(
            description="Texts that a client is known to put into the beginning of its prompts, "
            "another in each: left out, so that the prefix cache holds, or kept"
        ),
    ] = "leave-out"
    log_prompt_excerpts: Annotated[
        bool,
        Meta(
            description="Log the few words of a prompt at which it leaves the last one of its "
            "conversation; without it only their place is logged"
        ),
    ] = False
    linger_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds for which a request keeps running if its client leaves before the "
            "first token, so that an equal request can use its work; 0 if the body has attach: "
            "false",
        ),
    ] = 10.0
    state_dir: Annotated[
        str | None,
        Meta(
            description="Folder for streams that survive the server, redis://HOST:PORT/DB to share "
            "them between servers, or none to keep them in memory; $XDG_STATE_HOME/headrace/PORT "
            "if not given"
        ),
    ] = None
    load_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds until a model that has not loaded counts as failed")
    ] = 600.0
    drain_s: Annotated[
        float, Meta(ge=0, description="Seconds that running requests get at shutdown")
    ] = 30.0


class BatchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Files, and batches of lines that are answered from what others leave."""

    max_file_bytes: Annotated[Count, Meta(description="Largest file for a batch")] = 200 << 20
    key_file_bytes: Annotated[
        Count, Meta(description="Bytes of all files of one key, results of its batches included")
    ] = 2 << 30
    keep_files_days: Annotated[
        float, Meta(gt=0, le=36500, description="Days after which files and ended batches leave")
    ] = 30.0
    max_batch_lines: Annotated[Count, Meta(description="Lines of one batch")] = 50_000


class LoadingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The models that a server of several has in memory."""

    models_dir: Annotated[
        str | None, Meta(description="Folder whose subfolders are models, served by their names")
    ] = None
    max_models: Annotated[
        Count | None, Meta(description="Models in memory at once, where there are several")
    ] = None
    models_memory_bytes: Annotated[
        Count | None,
        Meta(description="Memory for weights and caches of all models, where there are several"),
    ] = None
    idle_unload_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="Seconds without use after which one of several models is unloaded, or an "
            "engine beyond --min-replicas leaves"
        ),
    ] = None


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A whole server."""

    models: tuple[ModelConfig, ...] = (ModelConfig(),)
    alias: Annotated[
        tuple[Annotated[str, Meta(pattern="^[^=]+=.+$", examples=["claude-*=headrace-mini"])], ...],
        Meta(
            description="Further name of a model or adapter as NAME=MODEL; * in NAME stands for "
            "any characters. Without = it is another --served-model-name"
        ),
    ] = ()
    loading: LoadingConfig = LoadingConfig()
    batches: BatchConfig = BatchConfig()
    http: HttpConfig = HttpConfig()
    streams: StreamConfig = StreamConfig()
    cluster: Annotated[
        str | None,
        Meta(
            description="Address of a Ray cluster whose nodes run the engines; without an address "
            "the cluster that this machine is part of"
        ),
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        Meta(
            description="Collector of traces, by OTLP over HTTP, such as http://127.0.0.1:4318; "
            "else that of OTEL_EXPORTER_OTLP_ENDPOINT, or none"
        ),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="What the log shows")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        Meta(description="Form of the log on stderr; json: an object a line, and nothing else"),
    ] = "text"
