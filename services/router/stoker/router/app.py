"""The router, wired together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import socket
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from stoker.api.router.v1 import router_pb2_grpc
from stoker.common import collecting, logs, otel, rpc, service, ticket_keys, tls
from stoker.common import metrics as exposition
from stoker.common.ticket_keys import KeyFile
from stoker.common.tls import ServerTlsConfig, Tls, TlsConfig
from stoker.router import metrics, server
from stoker.router.config import RouterConfig
from stoker.router.decisions.recorder import Recorder
from stoker.router.envoy.endpoints import ExtAuthz, ExtProc
from stoker.router.fleet.view import View
from stoker.router.flights.routing import Router
from stoker.router.grpc import call as grpc_call
from stoker.router.grpc.channels import Channels
from stoker.router.grpc.inference import InferenceServer
from stoker.router.http.engines import Engines
from stoker.router.http.listening import Listener, listen
from stoker.router.http.openai import OpenAIServer
from stoker.router.http.port import Port
from stoker.router.http.server import HttpPort
from stoker.router.picking import routes
from stoker.router.picking.calls import PickCalls
from stoker.router.picking.picker import Picker
from stoker.router.picking.picks import Picks
from stoker.router.picking.signing import Signer
from stoker.router.probes.checks import HealthChecks
from stoker.router.probes.parity import ParityProbe
from stoker.router.prompts.plan import Planner
from stoker.router.prompts.tokenizer_store import TokenizerStore
from stoker.router.server import RouterServer
from stoker.router.watching import Announcing, Watching, every, loop_lag
from stoker.router.workers import parent as workers
from stoker.router.workers.siblings import Siblings

log = structlog.get_logger(__name__)

_HOUSEKEEPING_S = 0.5
_ON_ITS_WAY_S = 2.0
_IDLE_S = 75.0
"""Who picks by HTTP and asks nothing for so long is let go, as at the OpenAI port."""
_CONNECTIONS_PER_REQUEST = 4
"""Clients keep idle ones."""


class RouterApp:
    """A whole router. Fed by registries, or by its owner through `view` and `fleet_changed`.

    `secure` has the certificates of its gRPC port and of its calls, `secure_http` those of the OpenAI port.
    """

    def __init__(
        self,
        config: RouterConfig,
        siblings: Siblings,
        secure: Tls | None = None,
        secure_http: Tls | None = None,
        keys: KeyFile | None = None,
    ) -> None:
        self.config = config
        self._secure = secure
        self._secure_http = secure_http
        self._siblings = siblings
        self._shared = siblings.count > 1
        rng = random.Random()  # noqa: S311 - jitter and ties
        self.view = View(config.routing, config.health)
        self.engines = Engines(config.limits.connect_s)
        self.channels = Channels(secure)
        self.tokenizers = TokenizerStore(self.channels.to, config.tokenizer.cache_dir, rng)
        self._threads = ThreadPoolExecutor(config.tokenizer.threads, thread_name_prefix="tokenize")
        self._announcing = Announcing()
        self._recorder = Recorder(config.record) if config.record.path else None
        self.router = Router(
            self.view,
            Planner(self.tokenizers, self._threads, config.tokenizer.inline_bytes),
            policy=config.policy,
            allow_policy=config.allow_policy_header,
            max_in_flight=config.limits.max_in_flight,
            retries=config.limits.retries,
            queue=config.queue,
            tenants=config.tenants,
            rng=rng,
            announce=self._announcing.tell,
            hurry=self._announcing.hurry,
            recorder=self._recorder,
        )
        self.checks = HealthChecks(self.view, self.engines, config.checks, rng, self.router.clock)
        send_tokens = config.tokenizer.send_tokens
        self.parity = ParityProbe(self.view, self.engines, self.tokenizers, rng, chat_tokens=send_tokens == "always")
        self._requests = HttpPort(
            OpenAIServer(self.router, self.engines, config.limits, siblings, send_tokens).handle,
            max_connections=_CONNECTIONS_PER_REQUEST * config.limits.max_in_flight,
        )
        signer = Signer(keys or KeyFile(config.tickets.keys), config.pick.ticket_s)
        self._own_pass = signer.own_pass
        unheard_s, longest_s = config.pick.ticket_s + _ON_ITS_WAY_S, config.limits.request_s
        self.picks = Picks(self.router, unheard_s, config.pick.silence_s, longest_s, siblings)
        self.picker = Picker(self.router, self.picks, signer, config.pick.alternatives, siblings)
        self._pick_calls = PickCalls(self.router, self.picker)
        self.pick_http = self._pick_port() if config.listen.pick else None
        self.envoy = ExtAuthz(config, self.router, siblings) if config.listen.ext_authz else None
        self.ext_proc = ExtProc(config, self.router, secure, shared=self._shared) if config.listen.ext_proc else None
        self._running = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Listen, not ready. Raises StokerError when an address is taken: then nothing is left running."""
        async with contextlib.AsyncExitStack() as running:
            running.callback(self._threads.shutdown, wait=False, cancel_futures=True)
            if self._recorder is not None:
                self._recorder.start()
                running.push_async_callback(asyncio.to_thread, self._recorder.close)
            parts = (self.engines, self.channels, self.tokenizers, self.parity, self.checks, self._announcing)
            for part in parts:
                running.push_async_callback(part.close)
            await self._start_grpc()
            running.push_async_callback(self.rpc.stop, 0.5)
            running.push_async_callback(self._siblings.close)
            await self._siblings.start()
            running.push_async_callback(self._requests.close)
            running.callback(self.picks.close)
            if self.envoy is not None:
                running.push_async_callback(self.envoy.close)
                await self.envoy.start()
            if self.ext_proc is not None:
                running.push_async_callback(self.ext_proc.close)
                await self.ext_proc.start()
            if self.pick_http is not None:
                running.callback(self.pick_http.close)
                await self.pick_http.start(self._secure)
            openai = await self._listen()
            running.callback(openai.close)
            self.http_port: int = openai.port
            self._running = running.pop_all()
        self._run(every(_HOUSEKEEPING_S, self._housekeep), "housekeeping")
        self._run(loop_lag(), "loop lag")
        self._run(self._announce(), "readiness")

    async def _start_grpc(self) -> None:
        services = (grpc_call.SERVICE, server.SERVICE)
        self.rpc = rpc.RpcServer.bind(self.config.listen.grpc, services, tls=self._secure, shared=self._shared)
        direct = self.config.grpc_path == "engine" or (self.config.grpc_path == "auto" and self._secure is None)
        inference = InferenceServer(
            self.router,
            self.channels,
            self.config.limits,
            self._own_pass,
            self.engines if direct else None,
            self.config.tokenizer.send_tokens,
        )
        inference.add_to(self.rpc.server)
        router_pb2_grpc.add_RouterServiceServicer_to_server(
            RouterServer(self.router, self._pick_calls, self._siblings), self.rpc.server
        )
        if self.envoy is not None:
            self.envoy.add_to(self.rpc.server)
        await self.rpc.start()

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run it beside the rest until the router closes."""
        task = asyncio.create_task(work, name=name)

        async def end() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self._running.push_async_callback(end)

    async def watch(self) -> None:
        """Follow the registries, and tell other routers through them."""
        watcher = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        await self._announcing.start(self.config.registries, watcher, self._secure, self.router.demand.report)
        watching = Watching(self.view, self.config.registries, watcher, self.fleet_changed, secure=self._secure)
        self._run(watching.run(), "watching")

    def fleet_changed(self) -> None:
        """Records changed: check, probe and connect accordingly, and let those go who waited for a first replica."""
        self.checks.sync()
        self.channels.keep(target.record.agent_endpoint for target in self.view.targets.values())
        for target in self.view.targets.values():
            if target.pool is not None and target.record.agent_endpoint:
                self.tokenizers.want(target)
        if self.config.parity:
            self.parity.sync()
        self.router.holding.pump()

    async def stop(self) -> None:
        """NOT_SERVING, drain, stop."""
        self.router.draining = True
        self._requests.retire()
        await self._set_serving(False)
        self.picks.close()  # their tokens do not come this way
        try:
            async with asyncio.timeout(self.config.drain_s):
                await self.router.idle.wait()
        except TimeoutError:
            log.warning("router.drain_incomplete", in_flight=self.router.in_flight)
        await self.close()

    async def close(self) -> None:
        """Stop at once."""
        await self._running.aclose()

    def _pick_port(self) -> Port:
        return Port(
            "listen.pick",
            self.config.listen.pick,
            routes.PickRoutes(self.router, self._pick_calls, self.config.limits).answer,
            self.config.limits,
            self.router.clock,
            example="127.0.0.1:7382",
            shared=self._shared,
            refuse=routes.refused,
            idle_s=_IDLE_S,
        )

    async def _listen(self) -> Listener:
        return await listen(
            "listen.http",
            self.config.listen.http,
            self._requests,
            example="127.0.0.1:7380",
            host_optional=True,
            secure=self._secure_http,
            shared=self._shared,
        )

    async def _set_serving(self, serving: bool) -> None:
        await self.rpc.set_serving(serving)
        if self.ext_proc is not None:
            await self.ext_proc.set_serving(serving)

    async def _announce(self) -> None:
        await self.view.told.wait()
        await self._set_serving(True)
        log.info("router.ready", replicas=len(self.view.targets))

    def _housekeep(self) -> None:
        self.view.tidy()
        self.picks.sweep()
        if self.pick_http is not None:
            self.pick_http.sweep()
        self.router.confirmations.check(self.router.clock())
        self._announcing.measure()
        self.router.demand.fold()
        metrics.IN_FLIGHT.set(self.router.in_flight)
        self.router.holding.pump()  # a replica may have answered a check again
        metrics.QUEUED.set(len(self.router.turns) + len(self.router.holding))
        metrics.HELD.set(len(self.router.holding))
        metrics.UNREACHABLE.set(sum(not target.reachable for target in self.view.targets.values()))
        if self.config.parity:
            self.parity.sync()


async def serve(config: RouterConfig, stop: asyncio.Event) -> None:
    """Run a router until `stop` is set, then drain it: in this process, or in several of its own."""
    if config.workers > 1:
        await workers.supervise(config, stop)
    else:
        await serve_here(config, stop, Siblings.alone())


async def serve_here(config: RouterConfig, stop: asyncio.Event, siblings: Siblings) -> None:
    """Run a router in this process."""
    with (
        exposition.exposed(config.metrics_listen),
        otel.traced("stoker-router", config.otlp_endpoint, config.otlp_sample),
    ):
        # The OpenAI port may have a certificate for the public of its own.
        http_tls = config.http_tls if config.http_tls != ServerTlsConfig() else _shown_to_anyone(config.tls)
        async with (
            tls.following(config.tls) as secure,
            tls.following(http_tls, "http_tls") as secure_http,
            ticket_keys.following(config.tickets.keys) as keys,
        ):
            app = RouterApp(config, siblings, secure, secure_http, keys)
            await app.start()
            try:
                await app.watch()
                collecting.settle()
                log.info("router.listening", grpc_port=app.rpc.port, http_port=app.http_port)
                await stop.wait()
            finally:
                await app.stop()


def _shown_to_anyone(config: TlsConfig) -> ServerTlsConfig:
    return ServerTlsConfig(certificate=config.certificate, key=config.key)


def main() -> None:
    """Entry point of `stoker-router`."""
    worker = workers.assigned()
    if worker is not None:
        config, siblings = worker
        logs.setup("stoker-router", level=os.environ.get("STOKER_LOG_LEVEL", "info"))
        structlog.contextvars.bind_contextvars(worker=siblings.number)

        async def work(config: RouterConfig, stop: asyncio.Event) -> None:
            async with workers.belonging(stop):
                await serve_here(config, stop, siblings)

        service.run(work, config)
        return
    service.main(
        "stoker-router",
        "Routes requests to the replica that holds their prefix.",
        RouterConfig,
        serve,
        flags={"workers": "processes that share the ports"},
    )
