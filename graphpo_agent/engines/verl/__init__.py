"""Training through verl: Ray, FSDP2 workers that update and vLLM servers that sample."""
