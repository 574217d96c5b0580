"""A resumed run draws as many random numbers for logged lines as the whole run, with rich 14.1 or one that draws like it."""

import functools
import random

import pytest
from rich.style import Style

from kohya_ext.config.settings import Settings
from kohya_ext.run import log_links


@pytest.fixture
def log(monkeypatch):
    """A function that logs a line of a file. It draws a number for each new link, as rich 14.1 does."""

    @functools.lru_cache
    def parse(definition):
        random.random()
        return definition

    def render(log_render, console, renderables, link_path=None, line_no=None):
        Style.parse(f"link file://{link_path}")
        Style.parse(f"link file://{link_path}#{line_no}")
        random.random()

    monkeypatch.setattr(Style, "parse", parse)
    monkeypatch.setattr(log_links, "_links", {})
    recorded = log_links.record(render, Settings())
    return lambda file, line: recorded(None, None, [], link_path=file, line_no=line)


def test_same_lines_draw_the_same_numbers_in_another_process(log):
    log("start.py", 1)
    log("save.py", 7)
    links, state = log_links.remembered(), random.getstate()
    for line in (7, 8):
        log("save.py", line)
    expected = random.random()

    log_links.remember([])  # a new process
    log("start.py", 1)
    log("load.py", 3)
    log_links.remember(links)
    random.setstate(state)
    for line in (7, 8):
        log("save.py", line)
    assert random.random() == expected
    assert log_links.remembered() == [*links, "link file://save.py#8"]


def test_path_that_rich_cannot_link_is_left_out(monkeypatch):
    monkeypatch.setattr(log_links, "_links", {})
    links = ["link file:///a program/args.py", "link file:///a/args.py#7"]
    log_links.remember(links)
    assert log_links.remembered() == links
    assert Style.parse.cache_info().currsize == 1


def test_styles_of_rich_stay_as_they_are_if_nothing_was_recorded(monkeypatch):
    monkeypatch.setattr(log_links, "_links", {})
    Style.parse("bold red")
    before = Style.parse.cache_info().currsize
    log_links.remember(log_links.remembered())
    assert Style.parse.cache_info().currsize == before > 0
