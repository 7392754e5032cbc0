"""Every option of the project, defined once: the command line, YAML files, `LLM(...)` and the
options page read it here.

Each part is what one process is given; names are unique across the parts, so that users see one
flat list.
"""

from dataclasses import Field, dataclass, field, fields
from typing import Any


def option(
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    unit: str = "",
) -> Any:
    """A field with what a user must know of it: meaning, unit, allowed values."""
    meta = {"text": text, "choices": choices, "least": least, "most": most, "unit": unit}
    return field(default=default, metadata=meta)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model, and in which form."""

    model: str | None = option(
        None,
        "a directory, a .gguf file, a hub id or a known short name; by default the embedded"
        " SmolLM2-135M-Instruct",
    )
    model_source: str = option(
        "huggingface", "the hub that is asked last", choices=("huggingface", "modelscope")
    )
    tokenizer: str | None = option(
        None, "where the tokenizer's files are, if not beside the model (as for --model)"
    )
    load_format: str = option(
        "auto",
        "auto reads the checkpoint; dummy fills the model's shape with random weights",
        choices=("auto", "dummy"),
    )
    dtype: str = option(
        "auto",
        "of weights, activations and KV; auto is the checkpoint's own where this machine computes"
        " it fast, else float32",
        choices=("auto", "float32", "bfloat16"),
    )
    quantization: str = option(
        "auto",
        "bits of matrices: int8 keeps 8 or fewer of every one and computes with 8-bit activations;"
        " none has all in the dtype; auto does with a GGUF file's Q8_0, Q4_0, Q4_1 and Q4_K as int8"
        " does unless dtype is float32, and else as none",
        choices=("auto", "none", "int8"),
    )
    generation_config: str = option(
        "auto",
        "auto takes defaults for sampling, and what ends an output, from the model's"
        " generation_config.json; none does without that file",
        choices=("auto", "none"),
    )
    max_seq_len_override: int | None = option(
        None,
        "most tokens of one sequence, prompt and output; by default the model's context",
        least=2,
        unit="tokens",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """How requests share the machine."""

    max_running_req: int = option(64, "requests that run at once", least=1, most=4096)
    max_queued_req: int = option(
        4096, "requests that may wait; one more is refused as an overload", least=1
    )
    max_extend_tokens: int = option(
        2048, "prompt tokens in one step; longer prompts take several", least=1, unit="tokens"
    )
    page_size: int = option(
        64,
        "tokens in one page of KV; a worker reads multiples of 64 fastest, then those of 16;"
        " smaller ones share prefixes more exactly",
        least=1,
        most=1024,
        unit="tokens",
    )
    cache_type: str = option(
        "radix",
        "radix keeps finished sequences for later prompts that start alike; naive keeps nothing",
        choices=("radix", "naive"),
    )
    policy: str = option(
        "fcfs",
        "who is admitted first: fcfs by arrival, lpm by the longest cached prefix, priority by the"
        " request's priority, which may push others out",
        choices=("fcfs", "lpm", "priority"),
    )
    overlap: bool = option(True, "plan step N+1 while step N runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How a step is computed."""

    tp: int = option(
        1, "tensor-parallel ranks, one worker each; this version runs one", least=1, most=1
    )
    threads: int | None = option(
        None,
        "compute threads of one worker; by default the physical cores, or what a container's quota"
        " allows of them",
        least=1,
        most=1024,
    )
    num_page_override: int | None = option(
        None,
        "pages in the KV pool, of page_size tokens each; by default what kv_memory_fraction holds",
        least=1,
    )
    simulated: str | None = option(
        None,
        "compute nothing: the simulated worker with these arguments, for example"
        " '--answers echo --step-ms 5' (python -m worker_proc --help)",
    )
    kv_memory_fraction: float = option(
        0.4,
        "share of the memory that is free once the weights are loaded that the KV pool may take",
        least=0.01,
        most=0.95,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where the server is reached and how patient it is."""

    endpoint: str | None = option(
        None,
        "address of the ZMQ endpoint, ipc://PATH or tcp://HOST:PORT (port 0: any free one); by"
        " default a socket in a private folder",
    )
    num_tokenizers: int = option(
        1,
        "tokenizer processes; every client spreads its requests over them",
        least=1,
        most=64,
    )
    startup_timeout: float = option(
        600.0, "give up when start-up makes no progress for this long", least=1, unit="seconds"
    )
    drain_timeout: float = option(
        30.0,
        "after SIGTERM, how long requests that run may take to end",
        least=0,
        unit="seconds",
    )
    log_level: str = option(
        "info", "what reaches standard error", choices=("debug", "info", "warning", "error")
    )
    shell: bool = option(
        False, "launch.py only: chat with the model in this terminal; leaving ends the server"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """The OpenAI-compatible HTTP front end."""

    http: bool = option(
        True, "serve HTTP too; an LLM in a script does so only where an option of HTTP is given"
    )
    http_host: str = option("127.0.0.1", "address or name of this machine that HTTP listens at")
    http_port: int | None = option(
        None,
        "port of HTTP, 0 for any free one; by default 8000, or any free one where that is taken",
        least=0,
        most=65535,
    )
    api_key: str | None = option(
        None, "what HTTP clients must send as 'Authorization: Bearer KEY'; by default nothing"
    )


PARTS: dict[str, type] = {
    "model": ModelOptions,
    "scheduler": SchedulerOptions,
    "worker": WorkerOptions,
    "server": ServerOptions,
    "http": HttpOptions,
}


def all_options() -> dict[str, tuple[str, Field[Any]]]:
    """Option name to (part, field), in the order in which help shows them."""
    return {f.name: (part, f) for part, cls in PARTS.items() for f in fields(cls)}
