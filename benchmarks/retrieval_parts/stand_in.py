"""A stand-in for Search-R1's retrieval server, written for this comparison.

It has that server's design: FastAPI, one synchronous handler, a Python loop that searches one
query after the other, and the framework's own JSON. What searches is the same retriever as ours.
"""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from graphpo_agent.protocols import Retriever

__all__ = ["make_app"]


class QueryRequest(BaseModel):
    """The body of ``POST /retrieve``."""

    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


def make_app(retriever: Retriever) -> FastAPI:
    """The application over a loaded retriever."""
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve(request: QueryRequest) -> Any:
        result = []
        for query in request.queries:
            [documents] = retriever.search([query], request.topk or 3)
            hits = []
            for document in documents:
                fields = {"id": document.id, "contents": document.contents}
                hits.append({"document": fields, "score": document.score})
            result.append(hits)
        return {"result": result}

    return app
