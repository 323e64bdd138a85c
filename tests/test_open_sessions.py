"""An HTTP session that a test leaves open is reported once, with the code that opened it.

Sessions that are closed or whose event loop still runs are not reported.
"""

import asyncio

import aiohttp

from tests.open_sessions import left_open


async def leave_open():
    session = aiohttp.ClientSession()
    assert left_open() == [], "its loop runs: it may be closed yet"
    return session


async def close_it():
    async with aiohttp.ClientSession():
        pass


def test_report_of_an_unclosed_http_session_names_the_code_that_opened_it():
    session = asyncio.run(leave_open())
    asyncio.run(close_it())
    (opener,) = left_open()
    assert "test_report_of_an_unclosed_http_session_names_the_code_that_opened_it" in opener
    assert "in leave_open" in opener
    assert left_open() == []
    session.detach()  # else aiohttp would warn about it when the process ends
