"""What an agent can call: one module per tool, each with a JSON schema."""
