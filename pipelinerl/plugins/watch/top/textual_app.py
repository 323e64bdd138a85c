"""The screen of `pipelinerl top`, drawn with textual: metrics left of the knobs, or above them on narrow terminals.

The app draws the newest snapshot of a `RunFollower` four times a second, and never waits for it. The arrow keys
select a knob; Enter starts and submits an edit; Escape cancels it. The app leaves the mouse to the terminal, for
selecting text.
"""

from __future__ import annotations

from contextlib import suppress
from typing import ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal, VerticalScroll
from textual.css.query import NoMatches
from textual.widget import MountError
from textual.widgets import Input, Static

from pipelinerl.observability.samples import one_line
from pipelinerl.plugins.watch.top.drawing import figures, knob_value
from pipelinerl.plugins.watch.top.run_follower import ChangeResult, RunFollower, RunSnapshot

_LOOK_S: Final = 0.25
_KEYS: Final = "↑↓ PgUp PgDn · Enter edit · Esc · q quit"


class KnobRow(Horizontal, can_focus=True):
    """A row with a knob's name and value; the value becomes an input field while the user edits it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "edit", "edit"),
        Binding("up,k", "app.focus_previous", "previous"),
        Binding("down,j", "app.focus_next", "next"),
    ]

    def __init__(self, knob: str, value: str) -> None:
        super().__init__()
        self.knob = knob
        self._value = value

    def compose(self) -> ComposeResult:
        yield Static(Text(one_line(self.knob), overflow="ellipsis", no_wrap=True), classes="name")
        yield Static(Text(self._value), classes="value")
        field = Input(compact=True, max_length=64, select_on_focus=True)
        field.display = False
        yield field

    def take(self, value: str) -> None:
        """Display a new value, but keep text that the user is typing."""
        if value != self._value:
            self._value = value
            self.query_one(".value", Static).update(Text(value))

    def action_edit(self) -> None:
        assert isinstance(self.app, TopApp)
        if self.app.refuses():
            return
        field = self.query_one(Input)
        field.value = self._value
        self._typing(True)
        field.focus()

    def leave(self) -> None:
        self._typing(False)
        self.focus()

    def _typing(self, typing: bool) -> None:
        self.query_one(Input).display = typing
        self.query_one(".value", Static).display = not typing


class TopApp(App[None]):
    """The screen of one run."""

    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012
        (0, "-stacked"),
        (76, "-beside"),
    ]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", show=False, priority=True),
        Binding("escape", "leave", "leave", show=False),
        Binding("pageup", "page(-1)", "figures above", show=False),
        Binding("pagedown", "page(1)", "figures below", show=False),
    ]
    CSS = """
    Screen { background: ansi_default; }
    #body { height: 1fr; layout: vertical; }
    .-beside #body { layout: horizontal; }
    #figures { height: 1fr; scrollbar-size-vertical: 1; scrollbar-gutter: stable; }
    #knobs { height: auto; max-height: 40%; scrollbar-size-vertical: 1; }
    .-beside #figures { width: 1fr; padding-right: 1; }
    .-beside #knobs { width: 33; height: 1fr; max-height: 100%; border-left: solid $panel; padding-left: 1; }
    KnobRow { height: 1; }
    KnobRow:focus { background: $accent; color: $text; }
    KnobRow .name { width: 1fr; height: 1; }
    KnobRow .value { width: auto; max-width: 12; height: 1; }
    KnobRow Input { width: 12; height: 1; }
    #message { height: auto; max-height: 3; }
    #message.refused { color: $error; }
    #keys { height: 1; color: $text-muted; }
    """

    def __init__(self, follower: RunFollower) -> None:
        super().__init__(ansi_color=True)
        self._follower = follower
        self._drawn: tuple[RunSnapshot | None, int] = (None, 0)
        self._shown: ChangeResult | None = None

    def compose(self) -> ComposeResult:
        with Container(id="body"):
            with VerticalScroll(id="figures", can_focus=False):
                yield Static("reading the run …", id="figures-text", markup=False)
            yield VerticalScroll(id="knobs", can_focus=False)
        yield Static("", id="message", markup=False)
        yield Static(_KEYS, id="keys", markup=False)

    def on_mount(self) -> None:
        self.set_interval(_LOOK_S, self._look)

    def on_resize(self) -> None:
        self.call_after_refresh(self._look)

    def refuses(self) -> bool:
        """Return True if knobs cannot be changed, and show the reason."""
        snapshot = self._follower.snapshot
        why = "the run is still being read" if snapshot is None else snapshot.obstacle
        if why:
            self._say(ChangeResult(why, refused=True))
        return bool(why)

    def action_leave(self) -> None:
        if isinstance(self.focused, Input) and isinstance(row := self.focused.parent, KnobRow):
            row.leave()

    def action_page(self, pages: int) -> None:
        pane = self.query_one("#figures", VerticalScroll)
        pane.scroll_relative(y=pages * pane.size.height, animate=False)

    def on_input_submitted(self, submitted: Input.Submitted) -> None:
        row = submitted.input.parent
        assert isinstance(row, KnobRow)
        row.leave()
        self._say(ChangeResult(f"{row.knob} = {submitted.value.strip()} was sent"))
        self._follower.change(row.knob, submitted.value.strip())

    async def _look(self) -> None:
        # The timer may run once more while the screen closes, when the widgets are already gone.
        with suppress(NoMatches, MountError):
            await self._draw()

    async def _draw(self) -> None:
        snapshot, result = self._follower.snapshot, self._follower.result
        if result is not self._shown and result is not None:
            self._shown = result
            self._say(result)
        width = max(20, self.query_one("#figures-text").content_size.width)
        if snapshot is None or (snapshot, width) == self._drawn:
            return
        if self._drawn[0] is None or snapshot.obstacle != self._drawn[0].obstacle:
            self._say(ChangeResult(snapshot.obstacle, refused=True) if snapshot.obstacle else ChangeResult(""))
        self._drawn = (snapshot, width)
        await self._show_knobs(snapshot)
        text = figures(snapshot, width)
        if snapshot.reading < 1.0:
            text = Text.assemble((f"{snapshot.reading:.0%} of the log has been read\n", "yellow"), text)
        self.query_one("#figures-text", Static).update(text)

    async def _show_knobs(self, snapshot: RunSnapshot) -> None:
        rows = {row.knob: row for row in self.query(KnobRow)}
        values = {name: knob_value(value) for name, value in snapshot.knobs.items()}
        for name in values.keys() & rows.keys():
            rows[name].take(values[name])
        await self.query_one("#knobs").mount(*(KnobRow(name, values[name]) for name in values if name not in rows))
        if self.focused is None and values:
            self.query(KnobRow).first().focus()

    def _say(self, result: ChangeResult) -> None:
        line = self.query_one("#message", Static)
        line.update(Text(one_line(result.sentence)))
        line.set_class(result.refused, "refused")
