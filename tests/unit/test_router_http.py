"""What the HTTP API answers before it asks anybody."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from stoker.router.config import LimitsConfig
from stoker.router.http.openai import OpenAIServer
from stoker.router.http.reading import ROUTES
from stoker.router.workers.siblings import Siblings


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_another_method_is_refused_with_405_and_the_one_allowed(path: str, method: str) -> None:
    nobody: Any = SimpleNamespace(view=SimpleNamespace())
    server = OpenAIServer(nobody, cast(Any, None), LimitsConfig(request_s=1.0), Siblings.alone(), "never")
    answer = await server.handle(make_mocked_request(method, path))
    assert isinstance(answer, web.Response)
    assert isinstance(answer.body, bytes)
    assert (answer.status, answer.headers["Allow"]) == (405, "POST")
    error = json.loads(answer.body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "method_not_allowed")
    assert f"{path} takes POST, not {method}" in error["message"]
