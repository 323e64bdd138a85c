"""The heap picks the same engine as a scan of all engines, but looks at few of them."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, strategies as st

from pipelinerl.engines.http.least_busy import LeastBusy

URLS = ("a", "b", "c", "d")


def slow(tokens: Counter[str], serving: set[str], avoided: set[str]) -> str | None:
    """Return the engine that a scan of all engines picks."""
    return min(serving - avoided, key=lambda url: (tokens[url], url), default=None)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from(URLS), st.integers(0, 9)),
            st.tuples(st.just("give back"), st.sampled_from(URLS), st.just(0)),
            st.tuples(st.just("serve"), st.sets(st.sampled_from(URLS)), st.just(0)),
            st.tuples(st.just("pick"), st.sets(st.sampled_from(URLS)), st.just(0)),
        ),
        max_size=200,
    )
)
def test_pick_equals_a_scan_of_all_engines(history: list[tuple[str, str | set[str], int]]) -> None:
    load, tokens, serving = LeastBusy(), Counter[str](), set[str]()
    asked: list[tuple[str, int]] = []
    for what, of, number in history:
        if isinstance(of, set):
            if what == "serve":
                serving = set(of)
                load.serve(serving)
            else:
                assert load.pick(of.__contains__) == slow(tokens, serving, of)
        elif what == "add":
            asked.append((of, number))
            tokens[of] += number
            load.add(of, number)
        elif asked:
            url, given_back = asked.pop()
            tokens[url] -= given_back
            load.add(url, -given_back)
        assert load.pick(lambda url: False) == slow(tokens, serving, set())
        assert load.outstanding == {url: tokens[url] for url in serving}


def test_ties_follow_the_name_or_the_given_order() -> None:
    urls = [f"http://10.0.0.{number}" for number in range(100)]

    def in_order(ties: str) -> list[str]:
        load, order = LeastBusy(ties), []
        load.serve(urls)
        while (url := load.pick(order.__contains__)) is not None:
            order.append(url)
        return order

    assert in_order("") == sorted(urls)
    first, second = in_order("actor-1"), in_order("actor-2")
    assert sorted(first) == sorted(second) == sorted(urls)
    assert first == in_order("actor-1"), "the same each time"
    assert len({*first[:25], *second[:25]}) > 30, "two actors do not begin with the same engines"


def test_picking_does_not_scan_a_thousand_engines() -> None:
    load, looked = LeastBusy(), Counter[str]()
    load.serve(f"{number:04}" for number in range(1000))

    def busy(url: str) -> bool:
        looked[url] += 1
        return False

    for _ in range(5000):
        url = load.pick(busy)
        assert url is not None
        load.add(url, 8)
    assert set(load.outstanding.values()) == {40}
    assert looked.total() == 5000
    assert len(load._heap) <= 4 * (1000 + 16), "what is not true any more does not pile up"
