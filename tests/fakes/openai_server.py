"""A fake third-party server of OpenAI chat completions, which knows no token ids and only OpenAI's own fields."""

from collections.abc import Callable
from typing import Any, final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

#: The fields of OpenAI's request that this server accepts.
KNOWN = {"model", "messages", "temperature", "top_p", "max_tokens", "seed", "stop"}


@final
class OpenAIFake:
    """Fails once with each status in `failures`; then answers each request body with the text from `answers`."""

    def __init__(self, answers: Callable[[dict[str, Any]], str], *, failures: tuple[int, ...] = ()) -> None:
        self.answers = answers
        self.failures = list(failures)
        self.bodies: list[dict[str, Any]] = []
        self.tokens: list[str] = []
        self.app = FastAPI(openapi_url=None)
        self.app.get("/v1/models")(self._models)
        self.app.post("/v1/chat/completions")(self._chat)

    async def _models(self) -> Any:
        return {"object": "list", "data": [{"id": "small", "object": "model"}, {"id": "large", "object": "model"}]}

    async def _chat(self, request: Request) -> Any:
        body = await request.json()
        self.bodies.append(body)
        self.tokens.append(request.headers.get("authorization", ""))
        if unknown := body.keys() - KNOWN:
            return _refused(400, f"unknown field {min(unknown)}")
        if self.failures:
            return _refused(self.failures.pop(0), "not now")
        text = self.answers(body)
        reason = "length" if len(text) >= body["max_tokens"] else "stop"
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
        return {
            "id": "x",
            "object": "chat.completion",
            "choices": [choice],
            "usage": {"prompt_tokens": 3, "completion_tokens": len(text), "total_tokens": 3 + len(text)},
        }


def _refused(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "x", "code": None}}, status_code=status)
