"""Hints for unknown names of settings: misspelt ones, and those of vLLM, vLLM-Omni and SGLang. Used
for flags, variables, YAML keys and `--tune`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches

OURS = {
    "api_server_count": "replicas",
    "chunked_prefill_size": "prefill_chunk",
    "context_length": "max_model_len",
    "data_parallel_size": "replicas",
    "disable_cuda_graph": "no_graphs",
    "disable_log_requests": "log_level",
    "disable_radix_cache": "no_prefix_cache",
    "distributed_executor_backend": "backend",
    "dp": "replicas",
    "dp_size": "replicas",
    "enable_metrics": "metrics",
    "enable_prefix_caching": "prefix_cache",
    "enforce_eager": "no_graphs",
    "forwarded_allow_ips": "trusted_proxies",
    "gpu_memory_utilization": "memory_share",
    "init_timeout": "start_timeout_s",
    "log_requests": "log_level",
    "max_num_batched_tokens": "max_step_tokens",
    "max_num_seqs": "max_rows",
    "max_prefill_tokens": "max_step_tokens",
    "max_queued_requests": "max_queue",
    "max_running_requests": "max_rows",
    "mem_fraction_static": "memory_share",
    "no_enable_prefix_caching": "no_prefix_cache",
    "num_gpu_blocks_override": "kv_blocks",
    "page_size": "block_size",
    "quantization": "expert_weights",
    "ray_head_address": "ray_address",
    "stage_configs_path": "placement",
    "stage_init_timeout": "start_timeout_s",
    "uvicorn_log_level": "log_level",
    "watchdog_timeout": "stall_s",
    "worker_backend": "backend",
}
"""Settings of other engines, and ours that does the same. Ours that begin with `no_` switch off."""

_ALWAYS = "needs no flag: it is always on"
_CHECKPOINT = "is not set here: the checkpoint's own files say it"
_CARDS = (
    "does not exist here, a stage is not split over cards: --placement puts stages on several "
    "cards, --replicas makes more pipelines"
)
_NO_DRAFTS = "does not exist here: there is no speculative decoding"
_REQUEST = "belongs to a request, not to the server"
_KERNELS = "is not chosen here: the GPU decides which kernels run"
NONE = {
    **dict.fromkeys(("chat_template", "tokenizer", "tokenizer_path", "hf_overrides"), _CHECKPOINT),
    **dict.fromkeys(("attention_backend", "moe_backend", "sampling_backend"), _KERNELS),
    **dict.fromkeys(("enable_auto_tool_choice", "tool_call_parser"), _ALWAYS),
    **dict.fromkeys(("enable_chunked_prefill", "async_chunk", "async_scheduling"), _ALWAYS),
    **dict.fromkeys(("seed", "random_seed", "max_tokens"), _REQUEST),
    **dict.fromkeys(("speculative_config", "speculative_algorithm"), _NO_DRAFTS),
    **dict.fromkeys(("tensor_parallel_size", "tp", "tp_size", "ep_size"), _CARDS),
    **dict.fromkeys(("pipeline_parallel_size", "pp", "pp_size", "enable_expert_parallel"), _CARDS),
    **dict.fromkeys(
        ("nnodes", "node_rank", "dist_init_addr"),
        "does not exist here: several machines are a Ray cluster, --backend ray",
    ),
    **dict.fromkeys(
        ("guided_decoding_backend", "grammar_backend"), "is not chosen here: it is llguidance"
    ),
    **dict.fromkeys(
        ("model", "model_path"), "is not a flag: name the model after the command, without one"
    ),
    **dict.fromkeys(("download_dir", "cache_dir"), "is HF_HOME in the environment"),
    **dict.fromkeys(
        ("cpu_offload_gb", "swap_space"), "does not exist here: weights and caches stay on the card"
    ),
    "cuda_graph_max_bs": "follows --max-rows here",
    "enable_lora": "does not exist here: adapters are not served",
    "kv_cache_dtype": "does not exist here: the KV caches have the --dtype of the weights",
    "limit_mm_per_prompt": "is fixed here: docs/server.md, What a request may hold",
    "omni": "needs no flag: every model is served so",
    "trust_remote_code": "does not exist here: code of a checkpoint is never run",
}
"""Settings of other engines that have none of ours, and a sentence about each."""


def explain(name: str, known: Iterable[str], spell: Callable[[str], str]) -> str:
    """A clause about an unknown name, with underscores: what it is here, or the nearest of the
    `known`. Empty, if neither is found. `spell` writes a name as the user did."""
    if name in OURS:
        return f"in Stretto it is {spell(OURS[name])}"
    if name in NONE:
        return f"it {NONE[name]}"
    if near := get_close_matches(name, sorted(known), 1):
        return f"did you mean {spell(near[0])}?"
    theirs = get_close_matches(name, [*OURS, *NONE], 1, 0.8)
    return explain(theirs[0], known, spell) if theirs else ""
