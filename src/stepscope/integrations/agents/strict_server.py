"""The SDK's server, but an argument that a tool does not have is an error: the SDK drops it without a word."""

from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from stepscope.integrations.agents.answers import marked


class StrictServer(MCPServer):
    """Checks the names of a call's arguments."""

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        for tool in await self.list_tools():
            known = tool.input_schema.get("properties", {})
            if tool.name == name and (unknown := [each for each in arguments if each not in known]):
                raise ToolError(marked(f"{name} has no argument {unknown[0]!r}: it takes {', '.join(known)}", 1000))
        return await super().call_tool(name, arguments, context)
