"""The stages of Qwen3-Omni with their links: what turns control messages and payloads into
requests."""
