"""What unit tests share."""

import pytest

from stoker.common import logs


@pytest.fixture(autouse=True)
def _no_logging_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run within a test set up logging for the whole process: the tests that follow would hear nothing."""
    monkeypatch.setattr(logs, "setup", lambda *_, **__: None)
