"""Deployment files: what is accepted, and how mistakes are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.api.common.v1 import common_pb2, placement_pb2, scaling_pb2
from stoker.cli import deployment_file
from stoker.common.errors import Code, StokerError

GOOD = """\
name: llama
model: /models/llama
engine: vllm
replicas: 3
engine_args: [--max-model-len, 8192]
env: {OMP_NUM_THREADS: 1}
role: prefill
node_selector:
  rack: a1
lora_adapters:
  - {name: sql, path: /adapters/sql}
"""


def mistakes(text: str) -> list[str]:
    with pytest.raises(StokerError) as raised:
        deployment_file.parse(text, "d.yaml")
    assert raised.value.reason == "BAD_FILE"
    assert raised.value.code is Code.INVALID_ARGUMENT
    return raised.value.message.splitlines()


def test_every_kind_of_field_is_read() -> None:
    spec = deployment_file.parse(GOOD, "d.yaml")
    assert spec == common_pb2.DeploymentSpec(
        name="llama",
        model="/models/llama",
        engine="vllm",
        replicas=3,
        engine_args=["--max-model-len", "8192"],
        env={"OMP_NUM_THREADS": "1"},
        role=common_pb2.ROLE_PREFILL,
        node_selector={"rack": "a1"},
        lora_adapters=[common_pb2.LoraAdapter(name="sql", path="/adapters/sql")],
    )


def test_one_replica_where_the_file_does_not_say() -> None:
    assert deployment_file.parse("{name: a, model: m, engine: sim}", "d.yaml").replicas == 1


def test_all_mistakes_are_told_with_their_lines() -> None:
    assert mistakes("name: a\nmodle: x\nreplicas: -1\nenv: 3\nrole: boss\nengine_args: -v\n") == [
        "d.yaml:2: modle: no such setting; did you mean model?",
        "d.yaml:3: replicas: '-1' is no whole number from 0 to 4294967295",
        "d.yaml:4: env: expected a mapping of texts",
        "d.yaml:5: role: 'boss' is none of both, prefill, decode",
        "d.yaml:6: engine_args: expected a list",
    ]


def test_bad_values_are_told_beside_bad_keys() -> None:
    assert mistakes("name: Not_Good\nmodle: x\nengine: tgi\n") == [
        "d.yaml:1: name: 'Not_Good' must be a-z, 0-9 and inner hyphens, at most 63 characters",
        "d.yaml:2: modle: no such setting; did you mean model?",
        "d.yaml:3: engine: 'tgi' is none of vllm, sim",
    ]


def test_mistakes_inside_lists_are_told_with_their_lines() -> None:
    text = GOOD.replace("{name: sql, path: /adapters/sql}", "{name: sql, paht: x}")
    assert mistakes(text) == ["d.yaml:11: paht: no such setting; did you mean path?"]


def test_what_is_missing_or_malformed_is_told() -> None:
    assert mistakes("name: Not_Good\nengine: tgi\n") == [
        "d.yaml:1: model: missing; it must be given",
        "d.yaml:1: name: 'Not_Good' must be a-z, 0-9 and inner hyphens, at most 63 characters",
        "d.yaml:2: engine: 'tgi' is none of vllm, sim",
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "d.yaml is empty; it needs at least name, model, engine and replicas"),
        ("- a\n- b\n", "d.yaml:1: expected a mapping of settings, `key: value` on each line"),
        ("name: a\nname: b\nmodel: m\nengine: sim\n", "d.yaml:2: name: given twice"),
        ("name: a\n\tmodel: b\n", "d.yaml:2: no valid YAML: found character '\\t' that cannot start any token"),
        ("name: [a\n", "d.yaml:2: no valid YAML: expected ',' or ']', but got '<stream end>'"),
    ],
)
def test_what_is_no_deployment_is_refused(text: str, told: str) -> None:
    assert mistakes(text) == [told]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StokerError, match=r"cannot read .*/none\.yaml: No such file"):
        deployment_file.read(tmp_path / "none.yaml")


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StokerError, match=r"it is no UTF-8 text"):
        deployment_file.read(tmp_path / "d.yaml")


def test_an_absurdly_large_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").write_text("#" * (1 << 20) + "#")
    with pytest.raises(StokerError, match=r"more than 1,048,576 bytes"):
        deployment_file.read(tmp_path / "d.yaml")


SCALED = """\
name: llama
model: m
engine: vllm
scaling:
  kind: slo
  group: llama
  slo: {ttft_s: 0.5, itl_s: 0.03}
  bounds:
    least: 0
    most: 8
    idle_s: 300
  concurrency: {weighted: true}
  schedules:
    - days: [monday, friday]
      begins: 08:00
      ends: 24:00
      least: 2
  price: {per_hour: 2.5}
"""


def test_how_a_deployment_scales_is_read() -> None:
    policy = deployment_file.parse(SCALED, "d.yaml").scaling
    assert policy == scaling_pb2.ScalingPolicy(
        kind=scaling_pb2.SCALING_KIND_SLO,
        group="llama",
        slo=scaling_pb2.ScalingSlo(ttft_s=0.5, itl_s=0.03),
        bounds=scaling_pb2.ScalingBounds(least=0, most=8, idle_s=300),
        concurrency=scaling_pb2.ScalingConcurrency(weighted=True),
        schedules=[
            scaling_pb2.ScalingSchedule(
                days=[scaling_pb2.WEEKDAY_MONDAY, scaling_pb2.WEEKDAY_FRIDAY], begins="08:00", ends="24:00", least=2
            )
        ],
        price=scaling_pb2.ScalingPrice(per_hour=2.5),
    )
    assert not deployment_file.parse(GOOD, "d.yaml").HasField("scaling"), "what says nothing stays fixed"


def test_mistakes_in_how_it_scales_are_told_with_their_lines() -> None:
    text = SCALED.replace("kind: slo", "kind: magic").replace("0.03", "fast").replace("true", "yes")
    text = text.replace("monday", "someday").replace("idle_s", "idel_s")
    assert mistakes(text) == [
        "d.yaml:5: kind: 'magic' is none of fixed, concurrency, saturation, slo, forecast",
        "d.yaml:7: itl_s: 'fast' is no number",
        "d.yaml:11: idel_s: no such setting; did you mean idle_s?",
        "d.yaml:12: weighted: 'yes' is neither true nor false",
        "d.yaml:14: days: 'someday' is none of monday, tuesday, wednesday, thursday, friday, saturday, sunday",
    ]


def test_what_the_registry_would_refuse_is_told_with_its_line() -> None:
    text = SCALED.replace("0.03", "-1").replace("most: 8", "most: 8\n    least: 9").replace("    least: 0\n", "")
    text = text.replace("begins: 08:00", "begins: noon")
    assert mistakes(text) == [
        "d.yaml:7: scaling.slo.itl_s: -1 is out of range; give 0.0001 to 60",
        "d.yaml:10: scaling.bounds.least: 9 is above `most`, 8; lower it or raise `most`",
        "d.yaml:15: scaling.schedules[0].begins: 'noon' is no time of day; give \"HH:MM\" in UTC",
    ]


def test_a_policy_stands_in_a_file_of_its_own_too(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("kind: concurrency\nconcurrency:\n  target: 4\n")
    assert deployment_file.read_policy(path) == scaling_pb2.ScalingPolicy(
        kind=scaling_pb2.SCALING_KIND_CONCURRENCY, concurrency=scaling_pb2.ScalingConcurrency(target=4)
    )
    path.write_text("kind: concurrency\nconcurrency:\n  target: 4\n  stable_s: 2\n")
    with pytest.raises(StokerError) as raised:
        deployment_file.read_policy(path)
    assert raised.value.message == (
        f"{path}:4: concurrency.stable_s: the panic window, 6 s, is longer than the stable one, 2 s"
    )
    path.write_text("")
    with pytest.raises(StokerError, match="at least a kind"):
        deployment_file.read_policy(path)


def test_a_placement_is_read_and_each_mistake_told_at_its_line() -> None:
    text = """\
name: llama
model: m
engine: vllm
gpus_per_node: 8
gang_size: 2
placement:
  tensor_parallel: 16
  watts_per_gpu: 650
  member_bytes_per_s: 2000000000
  pair: llama-decode
  pair_bytes_per_s: 500000000
  spread: {domains: [rack, source], largest_share: 0.5}
  regions: [{region: eu-central, share: 0.6}]
"""
    placement = deployment_file.parse(text, "llama.yaml").placement
    assert placement.member_bytes_per_s == 2_000_000_000
    assert list(placement.spread.domains) == [
        placement_pb2.FAILURE_DOMAIN_RACK,
        placement_pb2.FAILURE_DOMAIN_SOURCE,
    ]
    nothing = deployment_file.parse(text.replace("{domains: [rack, source], largest_share: 0.5}", "{}"), "llama.yaml")
    assert nothing.placement.HasField("spread"), "spread over nothing, which is not unsaid"
    wrong = text.replace("16", "12").replace("pair: llama-decode", "pair: llama").replace("650", "0")
    with pytest.raises(StokerError) as refused:
        deployment_file.parse(wrong, "llama.yaml")
    lines = refused.value.message.splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        ["llama.yaml:7", "placement.tensor_parallel"],
        ["llama.yaml:8", "placement.watts_per_gpu"],
        ["llama.yaml:10", "placement.pair"],
    ]
