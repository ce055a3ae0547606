"""A server of the Model Context Protocol over stdin and stdout, with one tool. Run by Codex.

The argument names a file, to which each call of the tool is appended.
"""

import json
import sys
from pathlib import Path
from typing import Any

TOOL = {
    "name": "find",
    "description": "Find where a thing is kept",
    "inputSchema": {
        "type": "object",
        "properties": {"thing": {"type": "string", "enum": ["wheel"]}},
        "required": ["thing"],
        "additionalProperties": False,
    },
    "annotations": {"readOnlyHint": True},
}
ANSWER = "The wheel is kept behind the mill."


def result_of(method: str, params: dict[str, Any], calls: Path) -> dict[str, Any]:
    if method == "initialize":
        version = params["protocolVersion"]
        about = {"name": "places", "version": "1"}
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        with calls.open("a") as file:
            call = {"name": params["name"], "arguments": params["arguments"]}
            file.write(json.dumps(call) + "\n")
        return {"content": [{"type": "text", "text": ANSWER}]}
    return {}


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        result = result_of(message["method"], message.get("params", {}), Path(sys.argv[1]))
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)


if __name__ == "__main__":
    main()
