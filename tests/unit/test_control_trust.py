"""When a leader may decide on what it sees."""

from dataclasses import replace

import pytest

from stoker.control.core.trust import Sight, Trust

GOOD = Sight(synced=True, vouched=True, age_s=0.5, revision=100)


def test_a_vouched_view_that_shows_every_write_is_trusted() -> None:
    assert Trust(10.0, fence_revision=100).doubt(GOOD, now=1000.0) == ""


@pytest.mark.parametrize(
    ("sight", "because"),
    [
        (replace(GOOD, synced=False), "no registry has told the whole state yet"),
        (replace(GOOD, vouched=False), "no registry vouches"),
        (replace(GOOD, age_s=10.1), "more than 10 s ago"),
        (replace(GOOD, revision=99), "does not show the last write"),
    ],
)
def test_each_doubt_is_named(sight: Sight, because: str) -> None:
    assert because in Trust(10.0, fence_revision=100).doubt(sight, now=1000.0)


def test_the_view_must_have_reached_the_fence_so_that_it_shows_what_earlier_leaders_wrote() -> None:
    trust = Trust(10.0, fence_revision=101)
    assert trust.doubt(GOOD, now=1000.0)
    assert not trust.doubt(replace(GOOD, revision=101), now=1000.0)


def test_the_view_must_show_the_leaders_own_writes() -> None:
    trust = Trust(10.0, fence_revision=1)
    trust.wrote(120)
    trust.wrote(110)
    assert trust.doubt(replace(GOOD, revision=119), now=1000.0)
    assert not trust.doubt(replace(GOOD, revision=120), now=1000.0)


def test_after_a_failed_write_the_view_must_have_been_proven_current_since() -> None:
    trust = Trust(10.0, fence_revision=1)
    trust.failed(now=1000.0)
    assert "failed write" in trust.doubt(replace(GOOD, age_s=0.2), now=1000.1)
    assert trust.doubt(replace(GOOD, age_s=0.5), now=1000.5)
    assert not trust.doubt(replace(GOOD, age_s=0.4), now=1000.5)
