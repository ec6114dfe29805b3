"""A server that speaks the ``/embed`` of Hugging Face's text-embeddings-inference.

That server itself is a Rust program and no Python package speaks its protocol.

``python -m benchmarks.calibration_parts.tei ENCODER_DIRECTORY PORT``
"""

import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, Field

from graphpo_agent.encoder import EncoderEmbedder

__all__ = ["make_app"]

MOST_TEXTS = 32
"""Of one request, as its default is there; more are refused with status 422."""


class EmbedRequest(BaseModel):
    """The body of ``POST /embed``."""

    inputs: list[str] = Field(max_length=MOST_TEXTS)


def make_app(encoder: EncoderEmbedder) -> FastAPI:
    """The application over a loaded encoder."""
    app = FastAPI()

    @app.get("/health")
    def health() -> None:
        """Status 200 once it answers."""

    @app.post("/embed")
    def embed(request: EmbedRequest) -> list[list[float]]:
        return encoder.embed(request.inputs).tolist()

    return app


if __name__ == "__main__":
    _, directory, port = sys.argv
    app = make_app(EncoderEmbedder(Path(directory)))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
