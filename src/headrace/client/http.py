"""What both clients have in common: defaults, and the way from what comes to what is given."""

from typing import Any

import httpx

from headrace.answer import Piece
from headrace.client.errors import StreamFailed
from headrace.client.events import Tokens

URL = "http://127.0.0.1:8000"
PATIENCE_S = 300.0
TIMEOUT = httpx.Timeout(30.0, pool=None)  # several heartbeats
LOST = (httpx.TransportError,)
"""A connection that could not be made, or broke."""


def key_header(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def to_piece(event: Tokens) -> Piece:
    text = "".join(piece.text for piece in event.pieces if piece.channel == "content")
    reason = event.end.finish_reason if event.end else None
    return Piece(event.choice, text, event.ids, reason)


def to_response(state: dict[str, Any]) -> dict[str, Any]:
    """The whole body of a stream that has ended; StreamFailed if it was cut."""
    if "response" in state:
        return dict(state["response"])
    error = state.get("error", {})
    message = error.get("message", "The stream has not ended.")
    raise StreamFailed(message, error.get("code", "unknown"))
