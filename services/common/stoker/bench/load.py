"""The load generator: closed-loop clients in a process of their own, over HTTP or gRPC.

Reads one `Job` as JSON from stdin; writes one line per finished request to stderr and one `Outcome` as JSON
to stdout. A client sends its next request when its last has ended.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import aiohttp
import grpc
import msgspec
import uvloop

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.bench.stats import Sample
from stoker.bench.workloads import Prompt
from stoker.common import rpc
from stoker.common.headers import POLICY, TENANT

REPLICA_HEADER = "x-stoker-replica"
SESSION_HEADER = "x-session-id"

_AFTER_FAILURE_S = 0.5


@dataclass(frozen=True)
class Target:
    """Where a client sends: an HTTP base URL, or a gRPC host:port."""

    api: Literal["http", "grpc"]
    address: str


@dataclass(frozen=True)
class Job:
    """One run."""

    prompts: list[Prompt]
    targets: list[Target]
    """Client i uses target i modulo their number."""
    model: str
    clients: int = 6
    policy: str = ""
    """Asked for by header; empty leaves it to the router."""
    salt: str = ""
    """cache_salt of all requests: runs with different salts share no KV block."""
    sessions: bool = False
    """Name a chat's conversation in a header, as some clients do and some routers want."""
    request_s: float = 300.0
    """Longest time of one request."""


@dataclass(frozen=True)
class Outcome:
    """All requests of a run, in the order of the prompts, and its length in seconds."""

    samples: list[Sample] = field(default_factory=list)
    wall_s: float = 0.0


class Sender(Protocol):
    """A client of one API."""

    async def send(self, prompt: Prompt, began_s: float) -> Sample:
        """Send one request and read its whole answer; raises what went wrong."""
        ...

    async def close(self) -> None:
        """Give up the connection."""
        ...


class HttpSender:
    """OpenAI HTTP, streaming."""

    def __init__(self, job: Job, address: str) -> None:
        self._job = job
        self._base = address
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=job.request_s),
            headers={POLICY: job.policy} if job.policy else {},
            read_bufsize=1 << 20,
        )

    async def send(self, prompt: Prompt, began_s: float) -> Sample:
        """Send one completion or chat."""
        body: dict[str, object] = {
            "model": self._job.model,
            "max_tokens": prompt.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._job.salt:
            body["cache_salt"] = self._job.salt
        if prompt.messages:
            path = "/v1/chat/completions"
            body["messages"] = [{"role": role, "content": content} for role, content in prompt.messages]
        else:
            path, body["prompt"] = "/v1/completions", prompt.text
        headers = {"content-type": "application/json"}
        if self._job.sessions and prompt.messages:
            headers[SESSION_HEADER] = prompt.group
        if prompt.tenant:
            headers[TENANT] = prompt.tenant
        content = msgspec.json.encode(body)
        start = time.perf_counter()
        ttft_s: float | None = None
        usage: dict[str, Any] = {}
        async with self._session.post(self._base + path, data=content, headers=headers) as answer:
            if answer.status != 200:
                await answer.read()
                raise RequestFailed(f"http_{answer.status}")
            async for line in answer.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = msgspec.json.decode(line[6:])
                if "error" in chunk:
                    raise RequestFailed("stream_error")
                if ttft_s is None and any(_has_content(c) for c in chunk.get("choices", ())):
                    ttft_s = time.perf_counter() - start
                usage = chunk.get("usage") or usage
            replica = answer.headers.get(REPLICA_HEADER, "")
        if ttft_s is None:
            raise RequestFailed("no_output")
        return Sample(
            api="http",
            began_s=began_s,
            ttft_s=ttft_s,
            total_s=time.perf_counter() - start,
            prompt_tokens=usage.get("prompt_tokens", 0),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            completion_tokens=usage.get("completion_tokens", 0),
            replica=replica,
            tenant=prompt.tenant,
        )

    async def close(self) -> None:
        """Close the session."""
        await self._session.close()


def _has_content(choice: dict[str, object]) -> bool:
    """Whether this chunk carries output, rather than only opening the assistant's turn."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return bool(delta.get("content")) or "role" not in delta
    return True


class GrpcSender:
    """InferenceService.Generate."""

    def __init__(self, job: Job, address: str) -> None:
        self._job = job
        self._channel = rpc.channel(address)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._metadata = ((POLICY, job.policy),) if job.policy else ()

    async def send(self, prompt: Prompt, began_s: float) -> Sample:
        """Send one Generate."""
        sampling = inference_pb2.Sampling(max_tokens=prompt.max_tokens, temperature=0, ignore_eos=True)
        request = inference_pb2.GenerateRequest(model=self._job.model, sampling=sampling, cache_salt=self._job.salt)
        if prompt.messages:
            for role, content in prompt.messages:
                part = inference_pb2.ContentPart(text=content)
                request.chat.messages.append(inference_pb2.ChatMessage(role=role, content=[part]))
        else:
            request.text = prompt.text
        start = time.perf_counter()
        ttft_s, replica, finished = None, "", None
        metadata = (*self._metadata, *(((TENANT, prompt.tenant),) if prompt.tenant else ()))
        async for answer in self._stub.Generate(request, metadata=metadata, timeout=self._job.request_s):
            if answer.HasField("delta"):
                ttft_s = ttft_s or time.perf_counter() - start
            elif answer.HasField("started"):
                replica = answer.started.replica_id
            else:
                finished = answer.finished
        if ttft_s is None or finished is None:
            raise RequestFailed("no_output" if ttft_s is None else "unfinished")
        usage = finished.usage
        return Sample(
            api="grpc",
            began_s=began_s,
            ttft_s=ttft_s,
            total_s=time.perf_counter() - start,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_prompt_tokens if usage.HasField("cached_prompt_tokens") else None,
            completion_tokens=usage.completion_tokens,
            replica=replica,
            tenant=prompt.tenant,
        )

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class RequestFailed(Exception):
    """A request that got no proper answer; the text is the kind of failure."""


async def drive(job: Job) -> Outcome:
    """Run all prompts; the clients take them in order, each once the one it follows has ended."""
    samples: list[Sample | None] = [None] * len(job.prompts)
    queue = _Queue(job.prompts)
    began = time.perf_counter()

    async def client(number: int) -> None:
        target = job.targets[number % len(job.targets)]
        sender: Sender = (HttpSender if target.api == "http" else GrpcSender)(job, target.address)
        try:
            while (taken := await queue.take()) is not None:
                began_s = time.perf_counter() - began
                try:
                    samples[taken] = await sender.send(job.prompts[taken], began_s)
                except (
                    RequestFailed,
                    aiohttp.ClientError,
                    grpc.RpcError,
                    TimeoutError,
                    msgspec.DecodeError,
                ) as error:
                    total_s = time.perf_counter() - began - began_s
                    samples[taken] = Sample(target.api, began_s, total_s=total_s, error=_kind(error))
                    # Who asks again at once uses up the workload on one outage.
                    await asyncio.sleep(_AFTER_FAILURE_S)
                await queue.done(taken)
                sys.stderr.write(f"{queue.finished}\n")
                sys.stderr.flush()
        finally:
            await sender.close()

    await asyncio.gather(*(client(number) for number in range(job.clients)))
    return Outcome([s for s in samples if s is not None], time.perf_counter() - began)


def _kind(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"grpc_{error.code().name.lower()}"
    return str(error) if isinstance(error, RequestFailed) else type(error).__name__


class _Queue:
    """Prompts in order, held back while what they follow is not finished."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._after = [prompt.after for prompt in prompts]
        self._waiting = list(range(len(prompts)))
        self._ended: set[int] = {-1}
        self._changed = asyncio.Condition()

    @property
    def finished(self) -> int:
        """Requests that have ended."""
        return len(self._ended) - 1

    async def take(self) -> int | None:
        """The next prompt that may go, None when there are no more."""
        async with self._changed:
            while self._waiting:
                for place, number in enumerate(self._waiting):
                    if self._after[number] in self._ended:
                        del self._waiting[place]
                        return number
                await self._changed.wait()
            return None

    async def done(self, number: int) -> None:
        """A prompt has ended, well or not."""
        async with self._changed:
            self._ended.add(number)
            self._changed.notify_all()


def main() -> None:
    """Run the job on stdin."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    outcome = uvloop.run(drive(job))
    sys.stdout.buffer.write(msgspec.json.encode(outcome))


if __name__ == "__main__":
    main()
