"""However an answer is cut, what its reader gets is what one engine would have said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker.router.core import Stops, seam

WORDS = st.lists(st.text("ab.", min_size=0, max_size=3), max_size=12)
STOPS = st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3)


@given(words=WORDS, stops=STOPS, cut=st.integers(0, 12), late=st.integers(0, 3), include=st.booleans())
def test_the_joined_text_is_the_whole_text(
    words: list[str], stops: list[str], cut: int, late: int, include: bool
) -> None:
    before, after = words[:cut], words[cut:]
    said = "".join(before)
    if any(stop in said for stop in stops):
        return  # it ended before it broke
    sent = said[: max(0, len(said) - late)]
    where = seam(before, sent)
    assert where is not None
    if where.before != said:
        raise AssertionError("tokens with text are all kept")
    watch = Stops(where, stops, include=include)
    joined, own = sent, ""
    for word in after:
        own += word
        joined += watch.feed(word)
        assert "".join(words).startswith(joined)
        if watch.met or any(stop in own for stop in stops):
            break
    if watch.met:
        at = (said + own).find(watch.met)
        expected = at + len(watch.met) if include else at
        assert joined == (said + own)[: max(expected, len(sent))]
        assert at < len(said) < at + len(watch.met)
    else:
        joined += watch.rest()
        assert joined == said + own
        # Whatever stands across the seam was found.
        for stop in stops:
            at = (said + own).find(stop, max(0, len(said) - len(stop) + 1))
            assert not 0 <= at < len(said)
