"""The server for coding agents, `stepscope mcp`."""
