"""What the engine's numbers mean: the HELP texts of /metrics. `metrics.py` writes them; a test
looks that none is missing. Names end in their unit: `_seconds`, `_bytes`, `_total` for counters;
others are plain counts."""

HELP = {
    "stretto_body_bytes": "Bytes of requests that are being read or prepared",
    "stretto_log_lines_dropped_total": "Lines of the server's log that were dropped because nobody "
    "read its stderr",
    "stretto_host_log_lines_dropped_total": "Lines of a host's log that were dropped because "
    "nobody read its stderr",
    "stretto_engine_requests_total": "Requests that the engine took",
    "stretto_engine_finished_total": "Requests that were answered to the end",
    "stretto_engine_failed_total": "Requests that ended with an error",
    "stretto_engine_cancelled_total": "Requests that their caller gave up",
    "stretto_engine_refused_total": "Requests that the engine had no room or no pace for",
    "stretto_engine_ahead_total": "Requests that read a turn's sound ahead of its end; not among "
    "the others",
    "stretto_engine_windows_changed_total": "Windows of sound that a louder one changed after they "
    "were read ahead",
    "stretto_engine_running": "Requests in the engine now, those included whose prompt is being "
    "built",
    "stretto_host_busy_seconds_total": "Time that a host's loop worked",
    "stretto_host_idle_seconds_total": "Time that a host's loop slept",
    "stretto_host_memory_bytes": "A host process in the machine's memory, without its GPU",
    "stretto_host_restarts_total": "Times that a host died and came back",
    "stretto_grammars_checking": "JSON schemas that are being checked",
    "stretto_grammars_waiting": "JSON schemas that wait to be checked",
    "stretto_prompts_running": "Requests that are being prepared in processes of their own",
    "stretto_prompts_waiting": "Requests that wait for a process that prepares them",
    "stretto_prompts_killed_total": "Preparations that ended because the client left",
    "stretto_prompts_over_limit_total": "Preparations that took too much, or broke a decoder",
    "stretto_prompt_worker_restarts_total": "Times that the prompt worker died",
    "stretto_prompt_worker_ready": "1 while prompts can be built, else 0",
    "stretto_process_open_fds": "Files and sockets that a process holds open: the server, the "
    "prompt worker, a host",
    "stretto_stage_requests": "Requests that a stage holds something for",
    "stretto_stage_waiting": "Requests that wait for a row of a stage's batch",
    "stretto_stage_queue_seconds": "Wait of a request for a row of a stage's batch, or for a slot "
    "of the vocoder",
    "stretto_stage_encoding": "Requests whose media are being encoded",
    "stretto_stage_encoded_total": "Pieces of media that were encoded",
    "stretto_stage_asked_total": "Pieces of media that a stage had to ask for again",
    "stretto_stage_steps_total": "Batches that a stage computed, by kind",
    "stretto_stage_rows_total": "Rows of the batches that a stage computed",
    "stretto_stage_tokens_total": "Tokens (or frames) that a stage picked",
    "stretto_stage_frames_total": "Frames that the vocoder made sound of",
    "stretto_stage_failed_steps_total": "Batches that failed",
    "stretto_stage_held_total": "Launches that were held back while the device still had work",
    "stretto_stage_late_total": "Launches that were held back for too long: the device had run out "
    "of work",
    "stretto_stage_gave_way_total": "Launches for frames that waited while another stage read "
    "prompts",
    "stretto_stage_launch_seconds": "Host time to launch a batch, by kind",
    "stretto_stage_device_seconds": "Time that the device worked on a batch, by kind",
    "stretto_stage_retire_seconds_total": "Host time to take in the results of batches",
    "stretto_stage_blocks": "Blocks of a stage's KV cache",
    "stretto_stage_blocks_available": "KV blocks that are free, or hold only what a later prompt "
    "may find again",
    "stretto_stage_slots": "Streams that the vocoder can hold",
    "stretto_stage_slots_available": "Streams that the vocoder has room for now",
    "stretto_stage_memory_bytes": "Device memory that was planned for a stage: weights and state",
    "stretto_stage_inboxes": "Requests whose input from the stage before is not all taken",
    "stretto_stage_outboxes": "Requests whose output for the next stage is not all sent",
    "stretto_link_handed_total": "Payloads that one stage handed to another of its host",
    "stretto_link_chunks_total": "Chunks over a link between processes",
    "stretto_link_bytes_total": "Bytes of payload over a link between processes",
    "stretto_link_stalls_total": "Chunks that found no credit (end out), or a full queue (end in)",
    "stretto_link_errors_total": "Chunks that were refused or lost",
    "stretto_link_credits": "Chunks that may be sent over a link now",
    "stretto_link_queued": "Chunks that wait between a stage and the thread of its end of a link",
    "stretto_link_purged_total": "Chunks that were dropped because their request was over",
    "stretto_link_put_seconds": "Time to send a chunk, the wait for a credit included",
    "stretto_link_take_seconds": "Time from a chunk's arrival until a stage can read it, its "
    "upload included",
    "stretto_link_queue_seconds": "Time that a chunk waited between a stage and the thread of its "
    "end of a link",
    "stretto_link_copy_seconds": "Time to copy a chunk off or onto the device",
}
