"""What agents and routers tell of blocks reaches the scaler through a real registry, and decides who goes."""

from __future__ import annotations

import random

from stoker.common import rpc
from stoker.common.blocks import block_keys, root_key, sampled
from stoker.control.config import LoopConfig
from stoker.registry.client import DispatchAnnouncer, RegistryClient
from stoker.scaler import app
from stoker.scaler.config import ScalerConfig
from tests.support.deciders import TTL_S, running
from tests.support.etcd import EtcdServer, free_port
from tests.support.registry import Agent, RegistryUnderTest, Watcher, assignment, config, node, spec
from tests.support.waiting import eventually

NAMES = ["chat-0", "chat-1", "chat-2"]


async def test_the_replica_goes_that_holds_what_nobody_asks_for(etcd_alone: EtcdServer) -> None:
    async with RegistryUnderTest(config(etcd_alone.endpoint)) as registry:
        endpoints = [registry.endpoint]
        mine = ScalerConfig(
            listen=f"127.0.0.1:{free_port()}",
            registries=(registry.endpoint,),
            loop=LoopConfig(candidate="one", leader_ttl_s=TTL_S, tick_s=0.1),
        )
        async with (
            RegistryClient(endpoints) as client,
            Watcher(endpoints) as watcher,
            Agent(endpoints, node("n1")) as agent,
            DispatchAnnouncer(endpoints, "router-1", rng=random.Random(1)) as router,
            running(app.serve, mine),
        ):
            view = watcher.watch.view
            assert await rpc.wait_serving(mine.listen, 10)
            await client.put_deployment(spec("chat", replicas=3))
            fence = (await client.acquire_leadership("planner", "test", 30.0)).fence
            await client.apply_assignments(fence, [assignment(name, "n1") for name in NAMES])
            await eventually(watcher.ready(*NAMES), within_s=60)
            prompts = {name: block_keys(range(16 * 2_000), 16, root_key("m", cache_salt=name)) for name in NAMES}
            for name, keys in prompts.items():
                agent.store(name, *keys)
            await eventually(lambda: all(len(watcher.blocks.get(name, ())) == 2_000 for name in NAMES))

            def asked(*names: str) -> bool:
                for name in names:
                    router.announce(name, 1, [], 1, 1, touched=sampled(prompts[name]))
                return True

            await eventually(router.connected.is_set)
            asked(*NAMES)
            await eventually(lambda: asked("chat-0", "chat-2") and router.sent > 60)
            await client.scale_deployment("chat", 2)
            await eventually(lambda: asked("chat-0", "chat-2") and bool(view.desired["chat"].victims))
            decided = view.desired["chat"]
            assert list(decided.victims) == ["chat-1"], decided
            (because,) = (because for because in decided.because if because.code == "VICTIM")
            assert because.text.startswith("chat-1 ")
            assert because.numbers["lost_tokens"] < 2_000 * 16 / 2
