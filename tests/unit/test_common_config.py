"""Configuration: defaults, files, overrides, and errors that name the field."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import pytest

from stoker.common import config


@dataclass(frozen=True)
class Listen:
    grpc: Annotated[str, msgspec.Meta(description="host:port of the gRPC server")] = "127.0.0.1:1"


@dataclass(frozen=True)
class Settings:
    ttl_s: Annotated[float, msgspec.Meta(description="time to live, seconds", gt=0)] = 10.0
    names: tuple[str, ...] = ()
    listen: Listen = field(default_factory=Listen)


def test_defaults_without_a_file() -> None:
    assert config.load(Settings) == Settings()


def test_file_then_overrides(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("ttl_s: 5\nlisten: {grpc: 'a:2'}\n")
    loaded = config.load(Settings, path, ["listen.grpc=b:3", "names=[x, y]"])
    assert loaded == Settings(ttl_s=5, names=("x", "y"), listen=Listen("b:3"))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("ttl_s=-1", "$.ttl_s"),
        ("ttl_s=soon", "$.ttl_s"),
        ("tll_s=1", "tll_s: no such setting; known here: listen, names, ttl_s"),
        ("listen.http=x", "listen.http: no such setting; known here: grpc"),
        ("ttl_s", "write it as key=value"),
        ("ttl_s.x=1", "no such setting|not a group|ttl_s"),
        ("=1", "no such setting"),
    ],
)
def test_bad_settings_name_the_field(override: str, says: str) -> None:
    with pytest.raises(config.ConfigError, match=says.replace("$", r"\$")):
        config.load(Settings, None, [override])


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "\x00"])
def test_bad_files_are_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(config.ConfigError, match=r"s\.yaml"):
        config.load(Settings, path)


def test_missing_file_is_named() -> None:
    with pytest.raises(config.ConfigError, match=r"/nowhere\.yaml"):
        config.load(Settings, Path("/nowhere.yaml"))


def test_description_reads_back_as_the_same_settings(tmp_path: Path) -> None:
    settings = Settings(ttl_s=3, names=("a",))
    path = tmp_path / "s.yaml"
    path.write_text(config.describe(settings))
    assert "# time to live, seconds" in path.read_text()
    assert config.load(Settings, path) == settings
